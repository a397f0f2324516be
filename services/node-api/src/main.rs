//! The `node-api` binary.

fn main() -> std::process::ExitCode {
    quintlet_kit::exit_code("node-api", node_api::main())
}
