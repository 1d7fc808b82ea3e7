"""Wan's networks, as a teacher (:mod:`..reconstruction`) and as a model (:mod:`..wan_vae`)."""
