"""The policies of Specter: one module each, imported here so that all of them are registered."""

from specter.registry import import_modules

import_modules(__name__)
