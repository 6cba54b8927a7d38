"""Model families, one module each. To add one: a module here and a config.json in specter/models/full_size/."""

from specter.registry import import_modules

import_modules(__name__)
