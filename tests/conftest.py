"""How many examples a property tries: `fast` on every run, `deep` where WARMFOLD_PROPERTIES=deep asks for it."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Time is no property of ours: a busy machine makes no test fail.
_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

settings.register_profile("fast", _PATIENT, max_examples=50, derandomize=True)
settings.register_profile("deep", _PATIENT, max_examples=3000)
settings.load_profile(os.getenv("WARMFOLD_PROPERTIES", "fast"))
