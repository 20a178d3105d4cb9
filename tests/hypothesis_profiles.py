"""How property tests draw their examples: by the test alone (``fixed``, the rule), or at random (``fuzz``, see ``fuzz.py``)."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

# Hypothesis mixes constants into its examples that it reads from the sources of local modules: of those that happen to be
# imported, and not if they have a folder "test" or "tests" in their path. So the examples would change with the folder of the
# clone and with the tests that ran before. There is no setting against it: we say that no module is local.
providers.is_local_module_file = lambda path: False

# Machines of any speed, whether or not hypothesis takes them for a server of continuous integration.
common = {
    "parent": settings.get_profile("default"),
    "database": None,
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow],
}
settings.register_profile("fixed", **common, derandomize=True, max_examples=40)
settings.register_profile("fuzz", **common, derandomize=False, max_examples=200, print_blob=True)
settings.load_profile("fixed")
