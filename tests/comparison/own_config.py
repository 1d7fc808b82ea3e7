"""A config that defines its model itself, which is another class each time it is loaded."""

OWN = '''
"""A model of one's own."""

import dataclasses

from jaxtrain import config
from jaxtrain.models import mlm

FF = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(mlm.Config):
    def build(self, rngs):
        """Builds it."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return mlm.Config(**fields | {"ff": FF}).build(rngs)


base = config.named("demo_mlm")
fields = {field.name: getattr(base.model, field.name) for field in dataclasses.fields(base.model)}
run = dataclasses.replace(base, model=Config(**fields))
'''
