r"""Programs that a model wrote, run where they can do no harm: bubblewrap, Landlock with seccomp, or a remote service.

Must not know: what a program is for, rewards. It needs the standard library only. See docs/sandbox.md.

    sandbox = open_sandbox()                # the first tier that holds what a hostile program tries; or SandboxError
    ran = sandbox.run("print(input()[::-1])", stdin="abc", limits=Limits(time_s=2))
    ran.status, ran.stdout                  # ("ok", "cba\n")
"""

from rallypoint.environments.sandbox.choose import open_sandbox
from rallypoint.environments.sandbox.program import Limits, Ran, Sandbox, SandboxError

__all__ = ["Limits", "Ran", "Sandbox", "SandboxError", "open_sandbox"]
