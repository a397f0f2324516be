//! The table of all fields and flags: the type, the default, the flags and the support of each.
//!
//! `--print-config`, the warnings at start and `docs/migration.md` are generated from it. Tests compare it
//! with the list of the kubelet's fields and with the services' command lines.

mod flags;
mod gates;
mod kubelet;
mod quintlet;

pub use flags::{FLAGS, FlagRow, FlagSupport};
pub use gates::{
    ALLOCATED_PODS, BIND_MOUNT_OPTIONS, CHECKPOINTS, CPU_ALPHA_OPTIONS, CPU_BETA_OPTIONS, CRASH_LOOP_MAX,
    DEFAULT_POD_SYSCTLS, DEVICE_HEALTH, EMPTY_DIR_MODE, FILE_OWNERS, GATES, GRPC_PROBE_TLS, Gate, H2C_PROBES,
    HUGE_PAGE_AWARE_EVICTION, IN_USER_NAMESPACE, MEMORY_QOS, MEMORY_VOLUME_RESIZE, POD_CERTIFICATES,
    POD_LEVEL_MANAGERS, PODS_API, QOS_RESERVED, QUOTA_MONITORING, RESIZE_PREEMPTION, SELINUX_MOUNT, SETTABLE,
    SPLIT_STREAMS, STOP_SIGNALS, TRUST_BUNDLE_PROJECTION, TRUST_BUNDLES, VOLUME_HEALTH, default_gate,
    has_gate, has_gate_or,
};
pub use kubelet::KUBELET;
pub use quintlet::QUINTLET;

use crate::kind::Kind;
use crate::node::LocatedValue;

/// A process that reads the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Service {
    /// The only client of the runtime's socket.
    CriProxy,
    /// Serves the node's HTTPS API.
    NodeApi,
    /// Caches the state of pods in the runtime.
    Pleg,
    /// Runs the probes of containers.
    Probe,
    /// Writes objects to the API server.
    StatusReporter,
    /// Decides what to do about pods.
    PodSync,
}

impl Service {
    /// All services.
    pub const ALL: [Self; 6] =
        [Self::CriProxy, Self::NodeApi, Self::Pleg, Self::Probe, Self::StatusReporter, Self::PodSync];

    /// Returns the name of the service, which is also that of its binary.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::CriProxy => "cri-proxy",
            Self::NodeApi => "node-api",
            Self::Pleg => "pleg-service",
            Self::Probe => "probe-service",
            Self::StatusReporter => "status-reporter",
            Self::PodSync => "pod-sync",
        }
    }
}

/// Whether and how Quintlet supports a field.
#[derive(Debug, Clone, Copy)]
pub enum FieldSupport {
    /// The field has its effect.
    Honoured {
        /// Short description of the effect.
        effect: &'static str,
        /// The services that honour the field.
        services: &'static [Service],
    },
    /// Any value other than the default is an error.
    Refused {
        /// The reason.
        why: &'static str,
    },
    /// The field will never have an effect. A value other than the default causes a warning.
    Ignored {
        /// The service that logs the warning.
        owner: Service,
        /// The reason.
        why: &'static str,
    },
}

/// A field of the configuration.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// Path in its document, such as `a.b`.
    pub field: &'static str,
    /// Type of its values.
    pub kind: Kind,
    /// The default as YAML; empty if the field has none.
    pub default: &'static str,
    /// The kubelet's flag for the field, without dashes.
    pub kubelet_flag: Option<&'static str>,
    /// Quintlet's flag for the field, if it differs from the kubelet's.
    pub own_flag: Option<&'static str>,
    /// Zero and empty are values of their own. In other fields they stand for the default.
    pub zero_counts: bool,
    /// The value is masked in output.
    pub secret: bool,
    /// Whether and how Quintlet supports the field.
    pub support: FieldSupport,
}

impl Row {
    /// Returns the flag of Quintlet's services for the field.
    #[must_use]
    pub fn flag(&self) -> Option<&'static str> {
        self.own_flag.or(self.kubelet_flag)
    }

    /// Returns the services that honour the field and have its flag.
    #[must_use]
    pub fn services(&self) -> &'static [Service] {
        match self.support {
            FieldSupport::Honoured { services, .. } => services,
            FieldSupport::Refused { .. } | FieldSupport::Ignored { .. } => &[],
        }
    }

    /// Returns the default value, if the field has one.
    #[must_use]
    pub fn default_node(&self) -> Option<LocatedValue> {
        if self.default.is_empty() {
            None
        } else {
            Some(self.kind.canonical(crate::yaml::value(self.default)))
        }
    }

    const fn new(field: &'static str, kind: Kind, default: &'static str) -> Self {
        Self {
            field,
            kind,
            default,
            kubelet_flag: None,
            own_flag: None,
            zero_counts: false,
            secret: false,
            support: FieldSupport::Refused { why: "" },
        }
    }

    const fn kubelet_flag(mut self, flag: &'static str) -> Self {
        self.kubelet_flag = Some(flag);
        self
    }

    const fn own_flag(mut self, flag: &'static str) -> Self {
        self.own_flag = Some(flag);
        self
    }

    const fn zero_counts(mut self) -> Self {
        self.zero_counts = true;
        self
    }

    const fn secret(mut self) -> Self {
        self.secret = true;
        self
    }

    const fn honoured(mut self, services: &'static [Service], effect: &'static str) -> Self {
        self.support = FieldSupport::Honoured { effect, services };
        self
    }

    const fn refused(mut self, why: &'static str) -> Self {
        self.support = FieldSupport::Refused { why };
        self
    }

    const fn ignored(mut self, owner: Service, why: &'static str) -> Self {
        self.support = FieldSupport::Ignored { owner, why };
        self
    }
}

/// The two kinds of documents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Document {
    /// `kubelet.config.k8s.io/v1beta1`, `KubeletConfiguration`.
    Kubelet,
    /// `quintlet.dev/v1alpha1`, `QuintletConfiguration`.
    Quintlet,
}

impl Document {
    /// Both kinds, in the order in which they are printed.
    pub const ALL: [Self; 2] = [Self::Kubelet, Self::Quintlet];

    /// Returns the document's `kind`.
    #[must_use]
    pub fn kind(self) -> &'static str {
        match self {
            Self::Kubelet => "KubeletConfiguration",
            Self::Quintlet => "QuintletConfiguration",
        }
    }

    /// Returns the document's `apiVersion`.
    #[must_use]
    pub fn api_version(self) -> &'static str {
        match self {
            Self::Kubelet => "kubelet.config.k8s.io/v1beta1",
            Self::Quintlet => "quintlet.dev/v1alpha1",
        }
    }

    /// Returns the fields of the document.
    #[must_use]
    pub fn rows(self) -> &'static [Row] {
        match self {
            Self::Kubelet => KUBELET,
            Self::Quintlet => QUINTLET,
        }
    }

    /// Returns the field with this path.
    #[must_use]
    pub fn row(self, field: &str) -> Option<&'static Row> {
        self.rows().iter().find(|r| r.field == field)
    }
}
