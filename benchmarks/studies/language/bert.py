"""BERT at 1.3M parameters, for studies on two CPU cores; 30% are masked, as for modern_bert."""

from jaxtrain import config

run = config.named("demo_mlm").override(
    {
        "data.demo": False,
        "model.sequence_length": 128,
        "model.mask_fraction": 0.3,
        "data.batch_size": 32,
        "loop.steps": 300,
        "loop.log_every": 50,
        "loop.eval_every": 150,
        "loop.eval_examples": 512,
        "checkpoint.every": 150,
        "checkpoint.keep": 1,
    }
)
