//! The `cri-proxy` binary.

#[global_allocator]
static ALLOCATOR: quintlet_kit::service::Allocator = quintlet_kit::service::Allocator;

fn main() -> std::process::ExitCode {
    quintlet_kit::service::register_process_metrics();
    cri_proxy::main()
}
