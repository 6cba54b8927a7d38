"""The baselines, one module each: what it is faithful to, where it departs, and the policies that it adds.

They run on the same engine as Specter and write the same records. A module registers its policies; a file in
conf/system/ names them (conf/config.yaml imports this package through `extensions`).
"""
