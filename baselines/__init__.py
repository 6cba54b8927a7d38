"""The rivals: one file each, which says what it is faithful to and holds what is its own.

They run on the same engine, through the same rule and into the same records as Specter.
"""
