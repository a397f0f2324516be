//! The contract of this crate, as assertions against any API server.

mod cluster;
mod node;
mod pods;
mod reading;
mod wire;

use serde_json::Value;

use wire::Wire;

/// Asserts the behaviours that a node agent relies on. The namespace is created if necessary. Created objects
/// are removed, except for events and a lease with the namespace's name.
///
/// # Panics
/// Panics if the server behaves differently; the message has the place.
pub async fn run_contract(client: kube::Client, namespace: &str) {
    let api = Wire { client, namespace: namespace.to_owned() };
    api.prepare().await;
    pods::creation(&api).await;
    pods::statuses(&api).await;
    pods::concurrency(&api).await;
    pods::patches(&api).await;
    pods::deletion(&api).await;
    reading::watching(&api).await;
    reading::listing(&api).await;
    cluster::nodes_and_leases(&api).await;
    cluster::events(&api).await;
    cluster::configuration(&api).await;
    cluster::tokens(&api).await;
    // A node without an agent would be assigned pods.
    api.delete(&format!("/api/v1/nodes/{namespace}"), Value::Null).await;
}

/// Asserts what a node may do and what it is refused. `node` has the identity of the node `name`, `admin` may
/// do everything. Node and lease of that name are recreated; the lease stays, as events do.
///
/// # Panics
/// Panics if the server behaves differently; the message has the place.
pub async fn run_node_contract(admin: kube::Client, node: kube::Client, name: &str, namespace: &str) {
    let admin = Wire { client: admin, namespace: namespace.to_owned() };
    let node = Wire { client: node, namespace: namespace.to_owned() };
    admin.prepare().await;
    let both = node::Both { admin: &admin, node: &node, name };
    both.prepare().await;
    both.registers().await;
    both.heartbeats().await;
    both.has_pods().await;
    both.mirrors().await;
    both.admin.delete(&format!("/api/v1/nodes/{name}"), Value::Null).await;
}
