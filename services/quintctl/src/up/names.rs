//! The names of the services, and their order.

/// The node API, which runs only with an API server.
pub(super) const NODE_API: &str = "node-api";

/// The binaries of the five services, in start order.
pub(super) const SERVICES: [&str; 5] =
    ["cri-proxy", "pleg-service", "probe-service", "status-reporter", "pod-sync"];

/// The service that owns the pods: it stops first, and only it drains.
pub(super) const POD_SYNC: &str = "pod-sync";

/// Groups of services that stop one after the other. Callers stop before the services that they call.
pub(super) const STOP_ORDER: [&[&str]; 3] =
    [&[POD_SYNC, NODE_API], &["status-reporter", "probe-service", "pleg-service"], &["cri-proxy"]];
