//! The `status-reporter` binary.

fn main() -> std::process::ExitCode {
    quintlet_kit::exit_code("status-reporter", status_reporter::main())
}
