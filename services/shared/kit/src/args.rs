//! Arguments every service has, and the places of all sockets.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Parser;
use quintlet_telemetry::{LogFormat, TelemetryOptions};

/// Exit code of a usage error (sysexits.h).
pub const EXIT_USAGE: i32 = 64;

/// Where sockets and volatile state are, unless told otherwise.
pub const RUN_DIR: &str = "/run/quintlet";

/// Arguments of every service.
#[derive(Debug, Clone, clap::Args)]
pub struct CommonArgs {
    /// Directory of the sockets and of state that lives until the next boot.
    #[arg(long, default_value = RUN_DIR, value_name = "DIR")]
    pub run_dir: PathBuf,
    /// Form of the log lines on stderr.
    #[arg(long, alias = "logging-format", default_value = "text", value_parser = ["text", "json"], value_name = "FORM")]
    pub log_format: String,
    /// What is logged, as a tracing filter: `info`, `debug`, `info,pod_sync=debug`.
    #[arg(long, default_value = "info", value_name = "FILTER")]
    pub log_level: String,
    /// OTLP/gRPC endpoint for traces, e.g. http://127.0.0.1:4317. Without it spans stay in memory.
    #[arg(long, value_name = "URL")]
    pub otlp_endpoint: Option<String>,
    /// Address for Prometheus metrics over HTTP at /metrics, e.g. 127.0.0.1:9101. Without it they are on the socket only.
    #[arg(long, value_name = "ADDR")]
    pub metrics_listen: Option<SocketAddr>,
    /// A user, by name or number, that may ask this service for health and metrics and for nothing else; may be given several
    /// times. Root and this process's own user always may. cri-proxy has --allow-uid instead.
    #[arg(long, value_name = "USER", value_parser = user_id)]
    pub observer_uid: Vec<u32>,
}

impl CommonArgs {
    /// What telemetry needs of them.
    #[must_use]
    pub fn telemetry(&self) -> TelemetryOptions {
        TelemetryOptions {
            log_format: if self.log_format == "json" { LogFormat::Json } else { LogFormat::Text },
            log_level: self.log_level.clone(),
            otlp_endpoint: self.otlp_endpoint.clone(),
        }
    }

    /// The places under the run directory.
    #[must_use]
    pub fn paths(&self) -> paths::Paths {
        paths::Paths::new(&self.run_dir)
    }
}

/// Parses the command line. A usage error ends the process with code 64; help and version with 0.
#[must_use]
pub fn parse<T: Parser>() -> T {
    T::try_parse().unwrap_or_else(|error| {
        let _ = error.print();
        std::process::exit(if error.use_stderr() { EXIT_USAGE } else { 0 });
    })
}

/// The uid of a user that is given by name or number.
///
/// # Errors
/// There is no such user.
pub fn user_id(given: &str) -> Result<u32, String> {
    if given.starts_with(|c: char| c.is_ascii_digit()) {
        return given.parse().map_err(|_| format!("{given:?} is no user id"));
    }
    match nix::unistd::User::from_name(given) {
        Ok(Some(user)) => Ok(user.uid.as_raw()),
        Ok(None) => Err(format!("there is no user {given:?}")),
        Err(error) => Err(format!("cannot look up the user {given:?}: {error}")),
    }
}

/// The name of a node as it was given: without blanks around it and in lower case, as the kubelet takes it.
///
/// # Errors
/// Nothing is left of it.
pub fn node_name(given: &str) -> Result<String, String> {
    let name = given.trim().to_lowercase();
    if name.is_empty() { Err("want a name".to_owned()) } else { Ok(name) }
}

/// The name of a node that was given none: the host's.
#[must_use]
pub fn host_name() -> String {
    let name = nix::unistd::gethostname().unwrap_or_default();
    node_name(&name.to_string_lossy()).unwrap_or_else(|_| "localhost".to_owned())
}

/// Where sockets and files are.
pub mod paths {
    use std::path::{Path, PathBuf};

    /// The sockets of cri-proxy, one per kind of caller.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum CriSocket {
        /// Full CRI, for root's tools.
        Admin,
        /// pod-sync.
        Sync,
        /// pleg-service and other readers.
        Read,
        /// The node API.
        NodeApi,
        /// probe-service.
        Probe,
    }

    impl CriSocket {
        /// All of them.
        pub const ALL: [Self; 5] = [Self::Admin, Self::Sync, Self::Read, Self::NodeApi, Self::Probe];

        /// Name of its directory.
        #[must_use]
        pub fn name(self) -> &'static str {
            match self {
                Self::Admin => "admin",
                Self::Sync => "sync",
                Self::Read => "read",
                Self::NodeApi => "node-api",
                Self::Probe => "probe",
            }
        }
    }

    /// The places under one run directory. Each socket has a directory of its own, so that it can be mounted alone.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct Paths {
        run: PathBuf,
    }

    impl Paths {
        /// Places under `run`.
        #[must_use]
        pub fn new(run: &Path) -> Self {
            Self { run: run.to_owned() }
        }

        /// The run directory.
        #[must_use]
        pub fn run(&self) -> &Path {
            &self.run
        }

        /// A socket of cri-proxy.
        #[must_use]
        pub fn cri(&self, socket: CriSocket) -> PathBuf {
            self.run.join("cri").join(socket.name()).join("cri.sock")
        }

        /// pleg-service.
        #[must_use]
        pub fn pleg(&self) -> PathBuf {
            self.run.join("pleg/pleg.sock")
        }

        /// Directory of probe-service's instances.
        #[must_use]
        pub fn probe_dir(&self) -> PathBuf {
            self.run.join("probe")
        }

        /// One instance of probe-service.
        #[must_use]
        pub fn probe(&self, id: &str) -> PathBuf {
            self.probe_dir().join(format!("{id}.sock"))
        }

        /// status-reporter.
        #[must_use]
        pub fn status(&self) -> PathBuf {
            self.run.join("status/status.sock")
        }

        /// pod-sync.
        #[must_use]
        pub fn podsync(&self) -> PathBuf {
            self.run.join("podsync/podsync.sock")
        }

        /// The node API: its health and metrics.
        #[must_use]
        pub fn node_api(&self) -> PathBuf {
            self.run.join("node-api/node-api.sock")
        }

        /// State that outlives a process, not a boot.
        #[must_use]
        pub fn state_dir(&self) -> PathBuf {
            self.run.join("state")
        }

        /// Where a supervisor notes how the last process of a service ended.
        #[must_use]
        pub fn exit(&self, service: &str) -> PathBuf {
            self.run.join("exits").join(service)
        }

        /// Key of exec grants.
        #[must_use]
        pub fn grant_key(&self) -> PathBuf {
            self.run.join("keys/grant.key")
        }
    }
}
