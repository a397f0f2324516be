//! Receives spans over OTLP/gRPC at 127.0.0.1:4317 until SIGTERM, in place of the collector of
//! docker/compose.yaml: tests/compose.sh. Prints a line `spans of SERVICE` when the first span of a service
//! arrives. Arguments have no meaning.
#![allow(clippy::print_stdout, reason = "it is what the test reads")]

use std::collections::BTreeSet;
use std::time::Duration;

use quintlet_e2e::otlp::Receiver;
use tokio::signal::unix::{SignalKind, signal};

/// Address that the services of docker/compose.yaml export to.
const ADDRESS: &str = "127.0.0.1:4317";
/// Interval between looks at the services whose spans have arrived.
const INTERVAL: Duration = Duration::from_millis(200);

fn main() -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let receiver = Receiver::start_at(ADDRESS).await;
        let mut terminate = signal(SignalKind::terminate())?;
        let mut printed = BTreeSet::new();
        loop {
            for service in receiver.services() {
                if printed.insert(service.clone()) {
                    println!("spans of {service}");
                }
            }
            // Both arms only wait.
            tokio::select! {
                _ = terminate.recv() => return Ok(()),
                () = tokio::time::sleep(INTERVAL) => {}
            }
        }
    })
}
