"""The policies that every property is tested on: all registered names, and options that matter."""

from kvpolicies.registry import POLICIES

VARIANTS = [
    "streaming(positions='cache')",
    "tova(faithful=True)",
    "beacon(n_beacon=4, n_recent=4)",
    "beacon(n_beacon=0, n_recent=8, pool='mean')",
    "beacon(n_beacon=8, n_recent=4, selector='initial')",
    "beacon(n_beacon=8, n_recent=4, space='post_rope')",
    "beacon(n_beacon=4, n_recent=4, pool='soft', temperature=0.5)",
    "beacon(n_beacon=4, n_recent=4, shared=True)",
    "beacon(n_beacon=4, n_recent=4, selector='naive_fps')",
    "beacon(n_beacon=4, n_recent=4, selector='kmeans_centroid')",
    "beacon(n_beacon=4, n_recent=4, selector='kmeans_nearest', shared=True)",
    "beacon(n_beacon=4, n_recent=4, refresh='revisit')",
    "beacon(n_beacon=4, n_recent=4, refresh='revisit', shared=True, space='post_rope')",
    "gkv(observe_window=3)",
    "vase(observe_window=3)",
    "criticalkv(observe_window=3)",
    "keydiff(quota='ams')",
    "beacon(n_beacon=4, n_recent=4, quota='ams')",
]
# Papers' own rules hold more than the budget asked for, and need the prompt's length to say so.
OWN_RULES = [
    "h2o(faithful=True)",
    "snapkv(observe_window=4, faithful=True)",
    "rpc(observe_window=4, faithful=True, P=16, c=2)",
    "rkv(every=8, alpha=4, faithful=True)",
    "lazy(every=8, alpha=0.05, faithful=True)",
    "gkv(every=8, observe_window=4, faithful=True)",
    "vase(observe_window=4, faithful=True)",
    "criticalkv(observe_window=4, faithful=True)",
]
# Learned policies need a scorer: random ones, for the tiny model only (see scorers.py). Where
# heads are drawn at random, tests/learned has the same properties at fixed sizes.
NEEDING_INPUT = [
    "dms(scorer='random/dms')",
    "trimkv(scorer='random/trimkv', every=3)",
    "kvzap(scorer='random/kvzap')",
    "kvzap(scorer='random/kvzap_mlp', every=3)",
    "fastkvzip(scorer='random/fastkvzip')",
]
LEARNED = [
    "kvpop(scorer='random/kvpop')",
    "kvpop(scorer='random/kvpop_at_entry', every=4, block=3)",
    "kvpop(scorer='random/kvpop_pre_rope')",
    "kvpop_mlp(scorer='random/kvpop_mlp')",
    *NEEDING_INPUT,
]
# Statistics of the tiny model.
CALIBRATED = ["triattention(statistics='random/triattention', every=3)"]
UNTRAINED = [
    s for s in POLICIES if s not in {spec.partition("(")[0] for spec in (*LEARNED, *CALIBRATED)}
]
EVICTING = [s for s in (*UNTRAINED, *VARIANTS) if s != "full"]
SPECS = [*UNTRAINED, *VARIANTS, *LEARNED, *CALIBRATED]
# Eviction times do not tell how keys are re-rotated: no trace, no replay.
UNTRACED = ["streaming(positions='cache')"]
REPLAYABLE = [s for s in SPECS if s not in UNTRACED]
PROTECTING = [s for s in EVICTING if "faithful" not in s]
# These need the tokens to come: they run on forced tokens, and not under `model.generate`.
LOOKING_AHEAD = ["oracle"]
UNAIDED = [s for s in SPECS if s not in LOOKING_AHEAD]
