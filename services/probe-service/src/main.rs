//! The `probe-service` binary.

fn main() -> std::process::ExitCode {
    quintlet_kit::exit_code("probe-service", probe_service::main())
}
