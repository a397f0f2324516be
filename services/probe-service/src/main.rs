//! The `probe-service` binary.

fn main() -> anyhow::Result<()> {
    probe_service::main()
}
