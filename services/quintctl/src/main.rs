//! The `quintctl` binary.

#[global_allocator]
static ALLOCATOR: quintlet_kit::service::Allocator = quintlet_kit::service::Allocator;

fn main() -> std::process::ExitCode {
    quintctl::main()
}
