//! Checks that no agent on another machine uses the name of the node, before anything of this one reaches the
//! API server.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use pod_sync_node_certificates::NodeClient;
use pod_sync_node_object::{MachineIds, NameDecision, NodeNameTaken, SeenRenewal, decide_name};
use pod_sync_offline::{Contact, Reply};
use quintlet_kit::clock::Clock;
use quintlet_kit::error_chain;
use quintlet_kit::task::blocking;
use tokio::time::timeout;

/// Namespace of the Leases of nodes.
const LEASES: &str = "kube-node-lease";
/// Interval between reads while the name is in doubt, and between attempts to reach the API server.
const READ_EVERY: Duration = Duration::from_secs(1);
/// Longest wait for Node and Lease.
const READ: Duration = Duration::from_secs(5);
/// Number of reads in a row that the API server may fail before the node starts unchecked: a start never
/// depends on one kind of object.
const FAILURES: u32 = 3;

/// The check of the node name.
pub(super) struct NameCheck {
    pub(super) client: NodeClient,
    pub(super) name: String,
    pub(super) clock: Clock,
    /// Gets the answers of the API server; none without the offline cache.
    pub(super) contact: Option<Arc<Contact>>,
}

impl NameCheck {
    /// Returns the agent that has the name, or none once the name is free.
    pub(super) async fn run(&self) -> Option<NodeNameTaken> {
        let own = blocking(|| MachineIds::read(Path::new("/"))).await;
        // A node that joins waits for its certificate, as long as that takes.
        while !self.client.is_ready() {
            tokio::time::sleep(READ_EVERY).await;
        }
        let mut seen: Option<(SeenRenewal, tokio::time::Instant)> = None;
        let mut failures = 0_u32;
        loop {
            let found = match self.read().await {
                Ok(found) => {
                    failures = 0;
                    found
                }
                Err(NameReadError::Unreachable(error)) => {
                    tracing::debug!(error, "node name not checked yet");
                    tokio::time::sleep(READ_EVERY).await;
                    continue;
                }
                Err(NameReadError::Failed(error)) => {
                    failures = failures.saturating_add(1);
                    if failures >= FAILURES {
                        tracing::warn!(node = self.name, error, "node name not checked, starting");
                        return None;
                    }
                    tokio::time::sleep(READ_EVERY).await;
                    continue;
                }
            };
            let (node, lease) = found;
            let earlier = seen.map(|(renewal, first)| SeenRenewal { ago: first.elapsed(), ..renewal });
            match decide_name(&own, node.as_ref(), lease.as_ref(), earlier, self.clock.wall()) {
                NameDecision::Free => return None,
                NameDecision::Taken(taken) => return Some(*taken),
                NameDecision::Doubtful(renewed) => {
                    if seen.is_none() {
                        tracing::info!(
                            node = self.name,
                            %renewed,
                            "another machine had this node name, waiting for its lease to expire"
                        );
                        let renewal = SeenRenewal { renewed, ago: Duration::ZERO };
                        seen = Some((renewal, tokio::time::Instant::now()));
                    }
                    tokio::time::sleep(READ_EVERY).await;
                }
            }
        }
    }

    async fn read(&self) -> Result<(Option<Node>, Option<Lease>), NameReadError> {
        let nodes: Api<Node> = Api::all(self.client.client());
        let leases: Api<Lease> = Api::namespaced(self.client.client(), LEASES);
        let both = async { tokio::try_join!(nodes.get_opt(&self.name), leases.get_opt(&self.name)) };
        let result = timeout(READ, both).await;
        if let Some(contact) = &self.contact {
            contact.record(result.as_ref().map_or(Reply::NoAnswer, Reply::of));
        }
        match result {
            Ok(Ok(found)) => Ok(found),
            Ok(Err(error @ kube::Error::Api(_))) => Err(NameReadError::Failed(error_chain(&error))),
            Ok(Err(error)) => Err(NameReadError::Unreachable(error_chain(&error))),
            Err(_) => Err(NameReadError::Failed(format!("no answer within {} s", READ.as_secs()))),
        }
    }
}

/// The Node or the Lease cannot be read.
enum NameReadError {
    /// There is no answer, as to all other requests.
    Unreachable(String),
    /// The API server answers with an error, or not in time.
    Failed(String),
}
