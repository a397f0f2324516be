//! Command-line arguments of every service, and the paths of all sockets.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Parser;
use quintlet_telemetry::{ALL_TRACES, LogFormat, Machine, TelemetryOptions};

/// Exit code of a usage error (sysexits.h).
pub const EXIT_USAGE: i32 = 64;

/// Default directory of sockets and of state that lives until the next boot.
pub const RUN_DIR: &str = "/run/quintlet";

/// Arguments of every service.
#[derive(Debug, Clone, clap::Args)]
pub struct CommonArgs {
    /// Directory of the sockets and of state that lives until the next boot.
    #[arg(long, default_value = RUN_DIR, value_name = "DIR")]
    pub run_dir: PathBuf,
    /// Format of the log lines on stderr.
    #[arg(long, alias = "logging-format", default_value = "text", value_parser = ["text", "json"], value_name = "FORM")]
    pub log_format: String,
    /// Log level as a tracing filter: `info`, `debug`, `info,pod_sync=debug`.
    #[arg(long, default_value = "info", value_name = "FILTER")]
    pub log_level: String,
    /// OTLP endpoint for traces, e.g. http://127.0.0.1:4317. Without it and OTEL_EXPORTER_OTLP_ENDPOINT,
    /// spans are kept in memory only.
    #[arg(long, value_name = "URL")]
    pub otlp_endpoint: Option<String>,
    /// Number of a million traces to export. A trace that another service or the API server began goes by
    /// their decision. Default: all
    #[arg(long, value_parser = clap::value_parser!(u32).range(..=i64::from(ALL_TRACES)), value_name = "N")]
    pub sampling_rate_per_million: Option<u32>,
    /// Address that serves Prometheus metrics over HTTP at /metrics, e.g. 127.0.0.1:9101. Without it, only
    /// the socket serves them.
    #[arg(long, value_name = "ADDR")]
    pub metrics_listen: Option<SocketAddr>,
    /// User, by name or number, that may only read health and metrics from this service. May be repeated.
    /// Root and the process's own user always have access. cri-proxy has --allow-uid instead.
    #[arg(long, value_name = "USER", value_parser = user_id)]
    pub observer_uid: Vec<u32>,
}

impl CommonArgs {
    /// Returns the options of telemetry. A service without an argument for the name of the node takes it from
    /// the environment variable `QUINTLET_NODE_NAME`.
    #[must_use]
    pub fn telemetry(&self, node_name: Option<String>) -> TelemetryOptions {
        TelemetryOptions {
            log_format: if self.log_format == "json" { LogFormat::Json } else { LogFormat::Text },
            log_level: self.log_level.clone(),
            otlp_endpoint: self.otlp_endpoint.clone(),
            sampling_rate_per_million: self.sampling_rate_per_million.unwrap_or(ALL_TRACES),
            machine: Machine { host_name: host_name(), node_name: node_name.or_else(exported_node_name) },
        }
    }

    /// Returns the paths below the run directory.
    #[must_use]
    pub fn paths(&self) -> paths::Paths {
        paths::Paths::new(&self.run_dir)
    }
}

/// Arguments of services that know the node and the API server.
#[derive(Debug, Clone, clap::Args)]
pub struct NodeArgs {
    /// Name of the node. Default: the host name in lower case
    #[arg(long, alias = "hostname-override", value_parser = node_name, value_name = "NAME")]
    pub node_name: Option<String>,
    /// Kubeconfig of the API server. Without it, the node is standalone
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
}

impl NodeArgs {
    /// Returns the name of the node.
    #[must_use]
    pub fn node_name(&self) -> String {
        self.node_name.clone().unwrap_or_else(host_name)
    }
}

/// Users that may subscribe to what a service publishes for programs that are not part of Quintlet.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct SubscriberArgs {
    /// User, by name or number, that may subscribe at the service's socket below RUN_DIR/subscribe. May be
    /// repeated. Without a user, a group and an address for subscribers there is no such socket.
    #[arg(long, value_name = "USER", value_parser = user_id)]
    pub subscriber_uid: Vec<u32>,
    /// Group, by name or number, whose members may subscribe: processes with it as their group. May be
    /// repeated.
    #[arg(long, value_name = "GROUP", value_parser = group_id)]
    pub subscriber_gid: Vec<u32>,
    /// Address at which node-api serves subscribers over TCP. For them, the user of --subscriber-relay-uid
    /// may subscribe at the socket.
    #[arg(long, value_name = "ADDR")]
    pub subscriber_listen: Option<SocketAddr>,
    /// User of node-api, by name or number.
    #[arg(long, value_name = "USER", value_parser = user_id)]
    pub subscriber_relay_uid: Option<u32>,
}

impl SubscriberArgs {
    /// Returns whether there are no subscribers.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.subscriber_uid.is_empty() && self.subscriber_gid.is_empty() && self.subscriber_listen.is_none()
    }

    /// Returns the users that may subscribe.
    #[must_use]
    pub fn users(&self) -> Vec<u32> {
        let relay = self.subscriber_relay_uid.filter(|_| self.subscriber_listen.is_some());
        self.subscriber_uid.iter().copied().chain(relay).collect()
    }
}

/// Parses the command line. Exits the process with code 64 on a usage error, and with 0 after printing help
/// or the version.
#[must_use]
pub fn parse<T: Parser>() -> T {
    T::try_parse().unwrap_or_else(|error| {
        let _ = error.print();
        std::process::exit(if error.use_stderr() { EXIT_USAGE } else { 0 });
    })
}

/// A user or group that was given by name or number is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AccountError {
    /// The text begins with a digit and is no number of 32 bits.
    #[error("{given:?} is not a {kind} ID")]
    NotAnId {
        /// `user` or `group`.
        kind: &'static str,
        /// The text.
        given: String,
    },
    /// No user or group has this name.
    #[error("{kind} {name:?} does not exist")]
    Unknown {
        /// `user` or `group`.
        kind: &'static str,
        /// Name that the database does not have.
        name: String,
    },
    /// The database cannot be read. The text has the cause: clap prints no sources.
    #[error("failed to look up {kind} {name:?}: {error}")]
    Lookup {
        /// `user` or `group`.
        kind: &'static str,
        /// Name that was looked up.
        name: String,
        /// The cause.
        error: nix::errno::Errno,
    },
}

/// The name of a node is empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the node name is empty")]
pub struct EmptyNodeName;

/// Returns the UID of a user given by name or number.
///
/// # Errors
/// Fails if the user does not exist or cannot be looked up.
pub fn user_id(given: &str) -> Result<u32, AccountError> {
    account_id("user", given, |name| Ok(nix::unistd::User::from_name(name)?.map(|user| user.uid.as_raw())))
}

/// Returns the GID of a group given by name or number.
///
/// # Errors
/// Fails if the group does not exist or cannot be looked up.
pub fn group_id(given: &str) -> Result<u32, AccountError> {
    account_id(
        "group",
        given,
        |name| Ok(nix::unistd::Group::from_name(name)?.map(|group| group.gid.as_raw())),
    )
}

fn account_id(
    kind: &'static str,
    given: &str,
    find: impl FnOnce(&str) -> Result<Option<u32>, nix::errno::Errno>,
) -> Result<u32, AccountError> {
    let name = given.to_owned();
    if given.starts_with(|c: char| c.is_ascii_digit()) {
        return given.parse().map_err(|_| AccountError::NotAnId { kind, given: name });
    }
    match find(given) {
        Ok(Some(id)) => Ok(id),
        Ok(None) => Err(AccountError::Unknown { kind, name }),
        Err(error) => Err(AccountError::Lookup { kind, name, error }),
    }
}

/// Normalizes the name of a node: trims white space and converts it to lower case
/// (`pkg/util/node: GetHostname`).
///
/// # Errors
/// Fails if the name is empty.
pub fn node_name(given: &str) -> Result<String, EmptyNodeName> {
    let name = given.trim().to_lowercase();
    if name.is_empty() { Err(EmptyNodeName) } else { Ok(name) }
}

/// Returns the name of the node in the environment, for traces.
fn exported_node_name() -> Option<String> {
    node_name(&std::env::var("QUINTLET_NODE_NAME").ok()?).ok()
}

/// Returns the default name of the node: the host name.
#[must_use]
pub fn host_name() -> String {
    let name = nix::unistd::gethostname().unwrap_or_default();
    node_name(&name.to_string_lossy()).unwrap_or_else(|_| "localhost".to_owned())
}

/// Paths of sockets and files.
pub mod paths {
    use std::collections::BTreeSet;
    use std::path::{Path, PathBuf};

    // Blocks: the run directory is on a tmpfs.
    /// Returns the names of the sockets in a directory, without `.sock`: the IDs of the instances of a
    /// service. A socket that is being created has a name with a dot in front, and is left out.
    #[must_use]
    pub fn socket_names(dir: &Path) -> BTreeSet<String> {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        let ids = names.filter_map(|name| Some(name.strip_suffix(".sock")?.to_owned()));
        ids.filter(|id| !id.starts_with('.')).collect()
    }

    /// The sockets of cri-proxy, one per kind of client.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum CriSocket {
        /// Full CRI, for the administrator's tools.
        Admin,
        /// Calls of pod-sync.
        Sync,
        /// Read-only calls, of pleg-service and other clients.
        Read,
        /// Calls of the node API.
        NodeApi,
        /// Exec probes of probe-service.
        Probe,
    }

    impl CriSocket {
        /// All sockets.
        pub const ALL: [Self; 5] = [Self::Admin, Self::Sync, Self::Read, Self::NodeApi, Self::Probe];

        /// Returns the name of the socket's directory.
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

    /// The paths below a run directory. Each socket has its own directory, so that it can be mounted alone.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct Paths {
        run: PathBuf,
    }

    impl Paths {
        /// Returns the paths below `run`.
        #[must_use]
        pub fn new(run: &Path) -> Self {
            Self { run: run.to_owned() }
        }

        /// Returns the run directory.
        #[must_use]
        pub fn run(&self) -> &Path {
            &self.run
        }

        /// Returns the path of a socket of cri-proxy.
        #[must_use]
        pub fn cri(&self, socket: CriSocket) -> PathBuf {
            self.run.join("cri").join(socket.name()).join("cri.sock")
        }

        /// Returns the socket of pleg-service.
        #[must_use]
        pub fn pleg(&self) -> PathBuf {
            self.run.join("pleg/pleg.sock")
        }

        /// Returns the directory with the sockets of all probe-service instances.
        #[must_use]
        pub fn probe_dir(&self) -> PathBuf {
            self.run.join("probe")
        }

        /// Returns the socket of a probe-service instance.
        #[must_use]
        pub fn probe(&self, id: &str) -> PathBuf {
            self.probe_dir().join(format!("{id}.sock"))
        }

        /// Returns the socket of status-reporter.
        #[must_use]
        pub fn status(&self) -> PathBuf {
            self.run.join("status/status.sock")
        }

        /// Returns the socket of pod-sync.
        #[must_use]
        pub fn podsync(&self) -> PathBuf {
            self.run.join("podsync/podsync.sock")
        }

        /// Returns the socket of node-api, which serves its health and metrics.
        #[must_use]
        pub fn node_api(&self) -> PathBuf {
            self.run.join("node-api/node-api.sock")
        }

        /// Returns the socket for subscribers of pleg-service.
        #[must_use]
        pub fn pleg_subscribers(&self) -> PathBuf {
            self.run.join("subscribe/pleg/subscribe.sock")
        }

        /// Returns the directory with the sockets for subscribers of all probe-service instances.
        #[must_use]
        pub fn probe_subscribers_dir(&self) -> PathBuf {
            self.run.join("subscribe/probe")
        }

        /// Returns the socket for subscribers of a probe-service instance.
        #[must_use]
        pub fn probe_subscribers(&self, id: &str) -> PathBuf {
            self.probe_subscribers_dir().join(format!("{id}.sock"))
        }

        /// Returns the socket for subscribers of pod-sync.
        #[must_use]
        pub fn podsync_subscribers(&self) -> PathBuf {
            self.run.join("subscribe/podsync/subscribe.sock")
        }

        /// Returns the directory of state that outlives a process but not a boot.
        #[must_use]
        pub fn state_dir(&self) -> PathBuf {
            self.run.join("state")
        }

        /// Returns the file in which a supervisor records the exit of a service's last process.
        #[must_use]
        pub fn exit(&self, service: &str) -> PathBuf {
            self.run.join("exits").join(service)
        }

        /// Returns the file with the key of exec grants.
        #[must_use]
        pub fn grant_key(&self) -> PathBuf {
            self.run.join("keys/grant.key")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_that_are_being_created_and_other_files_are_no_instances() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["probe-1.sock", "probe-0.sock", ".probe-2.sock", "lock"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        assert!(paths::socket_names(dir.path()).iter().eq(["probe-0", "probe-1"]));
        assert!(paths::socket_names(&dir.path().join("absent")).is_empty());
    }

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        subscribers: SubscriberArgs,
    }

    #[test]
    fn a_group_is_given_by_number_or_by_name() {
        assert_eq!((group_id("2000"), group_id("root")), (Ok(2000), Ok(0)));
        let error = |given| group_id(given).unwrap_err().to_string();
        assert_eq!(error("4294967296"), "\"4294967296\" is not a group ID");
        assert_eq!(error("no-such-group"), "group \"no-such-group\" does not exist");
    }

    #[test]
    fn subscribers_are_users_and_groups() {
        let parse = |flags: &[&str]| {
            Line::try_parse_from(std::iter::once("x").chain(flags.iter().copied()))
                .map(|line| line.subscribers)
        };
        let given = parse(&["--subscriber-uid=7", "--subscriber-gid=root", "--subscriber-gid", "8"]).unwrap();
        assert_eq!((&given.subscriber_uid[..], &given.subscriber_gid[..]), (&[7][..], &[0, 8][..]));
        assert!(!given.is_empty() && parse(&[]).unwrap().is_empty());
        for flags in [["--subscriber-gid=8"], ["--subscriber-uid=8"]] {
            assert!(!parse(&flags).unwrap().is_empty(), "{flags:?}");
        }
        let relay = parse(&["--subscriber-relay-uid=9"]).unwrap();
        assert!(relay.is_empty() && relay.users().is_empty(), "nobody subscribes over TCP");
        let over_tcp = ["--subscriber-relay-uid=9", "--subscriber-listen=[::1]:1", "--subscriber-uid=7"];
        assert_eq!(parse(&over_tcp).unwrap().users(), [7, 9]);
        assert!(!parse(&over_tcp[1..2]).unwrap().is_empty());
        let error = parse(&["--subscriber-gid=no-such-group"]).unwrap_err().to_string();
        assert!(error.contains("group \"no-such-group\" does not exist"), "{error}");
    }
}
