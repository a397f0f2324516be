//! What is probed: pods, their containers and their probes, as the driver last described them.

use std::sync::Arc;
use std::time::Duration;

use quintlet_model::ids::{ContainerId, PodRef};
use quintlet_model::probe::{ProbeMemory, ProbeType};

/// A pod with everything of it that is probed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    /// All its names.
    pub pod: PodRef,
    /// Of its assignment to this instance.
    pub generation: u64,
    /// Its probes.
    pub probes: Vec<Target>,
}

/// One probe of one container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// Container name.
    pub container: Arc<str>,
    /// How to probe.
    pub probe: Arc<Probe>,
    /// What the container is now.
    pub view: View,
    /// What the driver remembers of this probe on this container instance.
    pub seed: Option<ProbeMemory>,
}

/// How to probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probe {
    /// Which of the three.
    pub kind: ProbeType,
    /// What is done.
    pub handler: Handler,
    /// Not before this time after the start of the container.
    pub initial_delay: Duration,
    /// From one evaluation to the next.
    pub period: Duration,
    /// Of one attempt.
    pub timeout: Duration,
    /// Successes in a row that make a success.
    pub success_threshold: u32,
    /// Failures in a row that make a failure.
    pub failure_threshold: u32,
}

/// What a probe does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Handler {
    /// HTTP GET.
    Http(HttpGet),
    /// Connects and closes.
    Tcp {
        /// Where to. None: the pod's IP.
        host: Option<String>,
        /// Port, checked when probing.
        port: u32,
    },
    /// `grpc.health.v1.Health/Check` at the pod's IP.
    Grpc {
        /// Port, checked when probing.
        port: u32,
        /// Name of the service; may be empty.
        service: String,
    },
    /// A command in the container, through cri-proxy.
    Exec {
        /// argv.
        command: Vec<String>,
        /// What makes cri-proxy run it.
        grant: Vec<u8>,
    },
    /// A handler whose port has no number: each attempt says nothing but this text.
    Broken(String),
    /// The target names none this build knows.
    Missing,
}

/// An HTTP GET.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpGet {
    /// TLS, without verification.
    pub tls: bool,
    /// Where to. None: the pod's IP.
    pub host: Option<String>,
    /// Port, checked when probing.
    pub port: u32,
    /// A URL reference: path and perhaps a query.
    pub path: String,
    /// In order, with duplicates.
    pub headers: Vec<(String, String)>,
}

/// What a container is now, as the driver sees it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct View {
    /// The instance; None: there is none yet.
    pub container_id: Option<ContainerId>,
    /// It runs.
    pub running: bool,
    /// CLOCK_BOOTTIME of its start; None: not started yet.
    pub started_at: Option<Duration>,
    /// Its startup probe passed, or it has none.
    pub started: bool,
    /// Address of the pod; empty: none yet.
    pub pod_ip: String,
}

impl Handler {
    /// The host to talk to: its own, else the pod's. Empty: there is no address yet. None: it needs none.
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
