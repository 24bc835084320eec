"""Measure on real clusters: the testbed, its scenarios, and the harness that compares mappings.

From the outside in:

- `benchmark` measures every scenario with every model, and writes a file for each pair;
- `comparison` measures one model on one cluster, `enumeration` by every mapping, `midway` while hosts slow down;
- `task` holds the model, cluster and effort of a comparison, `mappings` plans what it compares;
- `groups` trains a few mappings at a time and starts their processes again, `pace` keeps them within a time limit;
- `harness` lets mappings take turns step by step, `training` runs one of these mappings;
- `faults` measures what survival costs, `kills` ends workers at many moments by `mortal`;
- `statistics`, `summary` and `differences` evaluate results;
- `demo` shows all of it in a few minutes.
"""
