//! The `pleg-service` binary.

#[global_allocator]
static ALLOCATOR: quintlet_kit::service::Allocator = quintlet_kit::service::Allocator;

fn main() -> std::process::ExitCode {
    pleg_service::main()
}
