"""From finished studies to a deployment: what `kvpolicies select` is made of.

`evidence` reads study folders, `bounds` and `power` say what they prove and what is missing,
`candidates` puts accuracy and memory side by side, `choice` holds the rule, `explaining` its words,
`deploying` the files.
"""
