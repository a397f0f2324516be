//! The `pleg-service` binary.

fn main() -> std::process::ExitCode {
    quintlet_kit::exit_code("pleg-service", pleg_service::main())
}
