//! Opens the client of the API server, which follows the certificate of the node.

use std::path::Path;

use anyhow::Context as _;
use pod_sync_node_certificates::decide::{KubeconfigCredential, is_expired};
use pod_sync_node_certificates::{NodeClient, credential_of};
use quintlet_kit::clock::Clock;

use crate::args::Args;

/// Directories below the run directory for copies of credentials. They exist where the services without root
/// need them.
const KUBECONFIG_COPY: &str = "credentials";
pub(crate) const SERVING_COPY: &str = "serving";

// Blocks: there is no pod before the start.
/// Returns the client of the API server. With a bootstrap kubeconfig, it waits for a valid client
/// certificate.
pub(crate) async fn node_client(args: &Args, clock: &Clock) -> anyhow::Result<Option<NodeClient>> {
    let has_bootstrap = args.certificates.bootstrap_kubeconfig.is_some();
    let Some(path) = &args.node.kubeconfig else {
        anyhow::ensure!(
            !has_bootstrap,
            "--bootstrap-kubeconfig needs --kubeconfig, the file that the bootstrap writes"
        );
        return Ok(None);
    };
    let client = if has_bootstrap && !has_valid_certificate(path, clock) {
        NodeClient::awaiting(path)
    } else {
        NodeClient::open(path).await.with_context(|| format!("{}", path.display()))?
    };
    Ok(Some(client.with_copy(&args.common.paths().run().join(KUBECONFIG_COPY))))
}

fn has_valid_certificate(kubeconfig: &Path, clock: &Clock) -> bool {
    match credential_of(kubeconfig) {
        KubeconfigCredential::Certificate(facts) => !is_expired(&facts, clock.wall()),
        KubeconfigCredential::NoFile | KubeconfigCredential::Unusable(_) | KubeconfigCredential::Other => {
            false
        }
    }
}
