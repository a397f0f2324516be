//! pod-sync as a process of its own that crashes at a step in the work of one pod.

use std::process::ExitCode;

fn main() -> ExitCode {
    quintlet_simulation::death::from_environment();
    pod_sync::main()
}
