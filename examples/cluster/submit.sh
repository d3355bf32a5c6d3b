#!/usr/bin/env bash
# Run `rally train` on a Ray cluster that is already there, with the files of the folder this is called from.
#
#     export RAY_API_SERVER_ADDRESS=http://127.0.0.1:8265   # the cluster's dashboard, perhaps through a tunnel
#     export RAY_AUTH_TOKEN_PATH=cluster.token              # a file with the cluster's token
#     examples/cluster/submit.sh mine.yaml cluster.pools.main=[4,4] trainer.runs_dir=/shared/runs
#
# The arguments are those of `rally train`. What stands on the screen is the run's log: ending this script does not end
# the run. To end it, with a checkpoint: `ray job stop ID`. Here `pip install "ray[default]"` of the cluster's version
# is needed; there, an image with rallypoint.
set -euo pipefail

: "${RAY_API_SERVER_ADDRESS:?set it to the address of the dashboard, such as http://127.0.0.1:8265}"
(($# > 0)) || {
    echo "error: which recipe? $0 RECIPE [KEY=VALUE]..." >&2
    exit 1
}
if [[ -z ${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-} ]]; then
    echo "error: set RAY_AUTH_TOKEN_PATH to a file with the cluster's token (or RAY_AUTH_TOKEN to the token)" >&2
    exit 1
fi
export RAY_AUTH_MODE=token

# The folder is shipped, 512 MiB at most and without what .gitignore names; models and large data belong on the shared
# volume. rallypoint adds itself to this environment.
exec ray job submit \
    --runtime-env-json '{
        "working_dir": ".",
        "excludes": [".git/", ".venv/", "runs/"]
    }' \
    -- rally train "$1" cluster.address=auto "${@:2}"
