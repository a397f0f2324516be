//! The process of node-api, from its command line to its exit code.

use std::process::ExitCode;

use node_api_access::limits::Limits;
use quintlet_config::Loaded;
use quintlet_kit::clock::Clock;
use quintlet_kit::notify::Liveness;
use quintlet_kit::server::HTTPS_LOOP;
use quintlet_kit::service::{self, Service};
use tokio_util::sync::CancellationToken;

use crate::run::StartError;
use crate::{NodeApi, NodeApiArgs};

/// Runs node-api as its own process. Exits with 64 on a usage error.
#[must_use]
pub fn main() -> ExitCode {
    let loaded = quintlet_config::parse::<NodeApiArgs>(quintlet_config::table::Service::NodeApi);
    let common = &loaded.args.common;
    let liveness = Liveness::of([common.paths().node_api()]).and_loop_if_any(HTTPS_LOOP);
    let service =
        Service { name: "node-api", common, node_name: Some(loaded.args.node.node_name()), liveness };
    service::run(service, || loaded.publish(), |stop| Box::pin(serve(&loaded, stop)))
}

async fn serve(loaded: &Loaded<NodeApiArgs>, stop: CancellationToken) -> Result<(), StartError> {
    let api = NodeApi::bind(loaded, Limits::default(), Clock::system()).await?;
    let address = api.address().map_or_else(|| "none".to_owned(), |address| address.to_string());
    let subscribers = api.subscriber_address().map(tracing::field::display);
    tracing::info!(address, subscribers, "serving node API");
    api.serve(stop).await;
    Ok(())
}
