"""ModernBERT with about as many parameters as bert, and its schedule."""

from jaxtrain import config
from jaxtrain.models import modern_bert

base = config.named("ettin_150m_h100_8")
run = config.load("bert.py").override(
    {
        "model": modern_bert.Config(
            vocab_size=4096,
            sequence_length=128,
            hidden=128,
            layers=6,
            heads=4,
            ff=192,
            local_attention=32,
            mask_fraction=0.3,
        ),
        "optim.schedule": base.optim.schedule,
        "optim.warmdown_fraction": 0.2,
        "optim.warmdown_shape": base.optim.warmdown_shape,
        "optim.clip_updates": base.optim.clip_updates,
        "optim.b2": base.optim.b2,
        "optim.weight_decay": base.optim.weight_decay,
    }
)
