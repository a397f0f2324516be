//! The `probe-service` binary.

#[global_allocator]
static ALLOCATOR: quintlet_kit::service::Allocator = quintlet_kit::service::Allocator;

fn main() -> std::process::ExitCode {
    quintlet_kit::service::register_process_metrics();
    probe_service::main()
}
