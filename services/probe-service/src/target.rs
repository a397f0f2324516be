//! Pods, containers and probes as the driver last described them.

use std::sync::Arc;
use std::time::Duration;

use quintlet_kit::url_scheme::UrlScheme;
use quintlet_model::ids::{ContainerId, PodRef};
use quintlet_model::probe::{ProbeMemory, ProbeType};

/// A pod with its probes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    /// Name, namespace and UID of the pod.
    pub pod: PodRef,
    /// Generation of the pod's assignment to this instance.
    pub generation: u64,
    /// All probes of the pod; a target that is absent is stopped.
    pub probes: Vec<Target>,
}

/// One probe of one container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// Name of the container in the spec.
    pub container: Arc<str>,
    /// Settings, which all pods of a Deployment have in common.
    pub probe: Arc<Probe>,
    /// State of the container.
    pub view: View,
    /// Memory of this probe that the driver kept from another instance or an earlier run.
    pub seed: Option<ProbeMemory>,
}

/// The settings of a probe (`core/v1.Probe`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probe {
    /// Startup, readiness or liveness.
    pub kind: ProbeType,
    /// The check that an attempt makes.
    pub handler: Handler,
    /// Time from the start of the instance to the first attempt.
    pub initial_delay: Duration,
    /// Time between two attempts.
    pub period: Duration,
    /// Limit of one attempt.
    pub timeout: Duration,
    /// Successes in a row after which the result is success.
    pub success_threshold: u32,
    /// Failures in a row after which the result is failure.
    pub failure_threshold: u32,
}

/// The check that one attempt makes (`core/v1.ProbeHandler`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Handler {
    /// Sends a request, and succeeds with a status from 200 to 399.
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
        /// Name in the HealthCheckRequest; may be empty.
        service: String,
        /// The connection uses TLS. The certificate is not verified.
        tls: bool,
    },
    /// Runs a command in the container, through cri-proxy.
    Exec {
        /// The program and its arguments, without a shell.
        command: Vec<String>,
        /// Signature of pod-sync, without which cri-proxy does not run the command.
        grant: Vec<u8>,
    },
    /// A handler whose port has no number. Each attempt is unknown, with this text.
    Broken(String),
    /// The target has no handler, or one that this version does not know.
    Missing,
}

/// The request of an HTTP probe (`core/v1.HTTPGetAction`).
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
    /// ID of the newest instance; `None` before the first one.
    pub container_id: Option<ContainerId>,
    /// Whether the instance runs.
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
