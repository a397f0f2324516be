//! The `pod-sync` binary.

fn main() -> std::process::ExitCode {
    pod_sync::main()
}
