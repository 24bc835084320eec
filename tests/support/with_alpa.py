"""Enable hwaware and import Alpa, as a plugin of pytest: `-p with_alpa` runs anybody's tests beside them."""

import builders

import hwaware

hwaware.enable(builders.cluster("ab"))

import alpa  # noqa: E402, F401 - the import is what is tested
