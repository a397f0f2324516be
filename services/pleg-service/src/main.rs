//! The `pleg-service` binary.

fn main() -> anyhow::Result<()> {
    pleg_service::main()
}
