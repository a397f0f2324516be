//! Pods, containers and probes as the driver last described them.

use std::sync::Arc;
use std::time::Duration;

use quintlet_kit::url_scheme::UrlScheme;
use quintlet_model::ids::{ContainerId, PodRef};
use quintlet_model::probe::{ProbeMemory, ProbeType};

/// A pod with its probes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    pub pod: PodRef,
    /// Generation of the pod's assignment to this instance.
    pub generation: u64,
    pub probes: Vec<Target>,
}

/// One probe of one container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    pub container: Arc<str>,
    pub probe: Arc<Probe>,
    pub view: View,
    /// Memory of this probe that the driver kept from another instance or an earlier run.
    pub seed: Option<ProbeMemory>,
}

/// The settings of a probe (`core/v1.Probe`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probe {
    pub kind: ProbeType,
    pub handler: Handler,
    pub initial_delay: Duration,
    pub period: Duration,
    /// Limit of one attempt.
    pub timeout: Duration,
    pub success_threshold: u32,
    pub failure_threshold: u32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Handler {
    Http(HttpGet),
    /// Opens a connection and closes it.
    Tcp {
        /// The pod's IP if none.
        host: Option<String>,
        /// Validated by each attempt.
        port: u32,
    },
    /// `grpc.health.v1.Health/Check` at the pod's IP.
    Grpc {
        /// Validated by each attempt.
        port: u32,
        service: String,
        /// The connection uses TLS. The certificate is not verified.
        tls: bool,
    },
    /// Runs a command in the container, through cri-proxy.
    Exec {
        command: Vec<String>,
        /// Signature of pod-sync, without which cri-proxy does not run the command.
        grant: Vec<u8>,
    },
    /// A handler whose port has no number. Each attempt is unknown, with this text.
    Broken(String),
    /// The target has no handler, or one that this version does not know.
    Missing,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpGet {
    /// Certificates of HTTPS are not verified.
    pub scheme: UrlScheme,
    /// The pod's IP if none.
    pub host: Option<String>,
    /// Validated by each attempt.
    pub port: u32,
    /// A URL reference: a path and, optionally, a query.
    pub path: String,
    /// Name and value, in order, with duplicates.
    pub headers: Vec<(String, String)>,
    /// HTTP/2 without TLS, from the first byte on. Only with the scheme http.
    pub h2c: bool,
}

/// The state of a container, as the driver sees it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct View {
    pub container_id: Option<ContainerId>,
    pub running: bool,
    /// CLOCK_BOOTTIME of the start of the container instance.
    pub started_at: Option<Duration>,
    /// The startup probe passed, or there is none.
    pub started: bool,
    /// Empty while the pod has no address.
    pub pod_ip: String,
}

impl Handler {
    /// Returns the host to connect to: that of the handler, else the pod's. Returns an empty host while the
    /// pod has no address, and none for a handler that needs no host.
    #[must_use]
    pub fn host<'a>(&'a self, pod_ip: &'a str) -> Option<&'a str> {
        match self {
            Self::Http(HttpGet { host, .. }) | Self::Tcp { host, .. } => {
                Some(host.as_deref().unwrap_or(pod_ip))
            }
            Self::Grpc { .. } => Some(pod_ip),
            Self::Exec { .. } | Self::Broken(_) | Self::Missing => None,
        }
    }
}
