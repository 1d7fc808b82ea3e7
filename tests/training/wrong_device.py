"""A program that trains, with a device that computes one wrong result."""

# The second computation of the second step that loop.replay_every checks has a wrong bit in its
# result on one device of the last process, on another host.
FAULTY = """
import dataclasses, os, socket, time, jax, numpy as np
from jaxtrain import main
from jaxtrain.training.diagnosis import replay

calls, compare = [], replay.Replay.__call__
last = os.environ.get("JAX_PROCESS_ID", "0") == os.environ.get("JAX_LAST_PROCESS", "0")
if last:
    socket.gethostname = lambda: "broken-host"

def call(self, done, state, batch, scalars):
    step = self._step
    time.sleep(float(os.environ.get("SECONDS_BEFORE_CHECKS", "0")))

    def faulty(state, batch, scalars):
        calls.append(done)
        following, metrics = step(state, batch, scalars)
        if len(calls) == 4 and last:
            name = min(following.params)
            array = following.params[name]
            parts = [shard.data for shard in array.addressable_shards]
            bits = np.array(parts[-1]).view(np.uint32)
            bits.reshape(-1)[0] ^= 1 << 20
            parts[-1] = jax.device_put(bits.view(np.float32), parts[-1].device)
            print(f"wrong is {parts[-1].device.id};", flush=True)
            wrong = jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)
            params = following.params | {name: wrong}
            following = dataclasses.replace(following, params=params)
        return following, metrics

    self._step = faulty
    try:
        return compare(self, done, state, batch, scalars)
    finally:
        self._step = step

replay.Replay.__call__ = call
main.console()
"""
