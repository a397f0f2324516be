//! The `cri-proxy` binary.

fn main() -> std::process::ExitCode {
    quintlet_kit::exit_code("cri-proxy", cri_proxy::main())
}
