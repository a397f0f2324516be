//! The command line.
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use quintlet_config::ConfigArgs;
use quintlet_kit::args::paths::CriSocket;
use quintlet_kit::args::{CommonArgs, user_id};

/// Owns the connection to the container runtime: forwards all CRI calls, image pulls and runtime events of
/// the node.
#[derive(Debug, Clone, Parser)]
#[command(name = "cri-proxy", version)]
pub(crate) struct Args {
    /// Socket of the runtime.
    #[arg(long, alias = "container-runtime-endpoint", value_name = "URL", default_value = "unix:///run/containerd/containerd.sock", value_parser = endpoint)]
    pub runtime_endpoint: PathBuf,
    /// Socket of the image service. Default: the socket of the runtime.
    #[arg(long, value_name = "URL", value_parser = endpoint)]
    pub image_service_endpoint: Option<PathBuf>,
    /// Time limit of a call to the runtime, with a unit. Pulls, execs and attaches have no such limit.
    #[arg(long, value_name = "DURATION", default_value = "2m", value_parser = humantime::parse_duration)]
    pub runtime_request_timeout: Duration,
    /// The containerd namespace of pods.
    #[arg(long, value_name = "NAME", default_value = "k8s.io", value_parser = namespace)]
    pub containerd_namespace: String,
    /// User that may connect to a socket, in addition to root and the process's own user: read=quintlet-pleg
    /// or read=65530. Sockets: admin, sync, read, node-api, probe. May be repeated.
    #[arg(long, value_name = "SOCKET=USER", value_parser = allowed)]
    pub allow_uid: Vec<Allowed>,
    /// Directory of container logs. Logs outside of it are not read.
    #[arg(long, value_name = "DIR", default_value = "/var/log/pods")]
    pub pod_logs_dir: PathBuf,
    /// Score of this process for the kernel's choice of a process to kill; -1000 excludes the process.
    #[arg(long, default_value_t = -999, allow_negative_numbers = true, value_parser = clap::value_parser!(i32).range(-1000..=1000), value_name = "SCORE")]
    pub oom_score_adj: i32,
    /// Directories and telemetry, as for every service.
    #[command(flatten)]
    pub common: CommonArgs,
    /// Configuration files and their precedence over flags.
    #[command(flatten)]
    pub config: ConfigArgs,
}

/// A user that may connect to a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Allowed {
    /// The socket that the user may connect to, in addition to root.
    pub socket: CriSocket,
    /// The user's ID, as the kernel reports it for the connection.
    pub uid: u32,
}

/// Parses `SOCKET=USER`. The user is a name or a number.
fn allowed(text: &str) -> Result<Allowed, String> {
    let sockets = CriSocket::ALL.map(CriSocket::name).join(", ");
    let (socket, user) =
        text.split_once('=').ok_or_else(|| format!("want SOCKET=USER with a socket of {sockets}"))?;
    let socket = CriSocket::ALL
        .into_iter()
        .find(|s| s.name() == socket)
        .ok_or_else(|| format!("{socket:?} is none of the sockets {sockets}"))?;
    Ok(Allowed { socket, uid: user_id(user).map_err(|error| error.to_string())? })
}

/// Parses `unix:///path` or an absolute path.
fn endpoint(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text.strip_prefix("unix://").unwrap_or(text));
    if path.is_absolute() { Ok(path) } else { Err("want unix:///absolute/path".to_owned()) }
}

/// Checks a namespace by containerd's rule, which also makes it safe in filters and metadata.
fn namespace(text: &str) -> Result<String, String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    if !text.is_empty() && text.len() <= 76 && text.chars().all(fits) {
        Ok(text.to_owned())
    } else {
        Err("want at most 76 letters, digits, dots, dashes and underscores".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;
    use quintlet_config::table::Service;

    use super::*;

    #[test]
    fn the_table_of_fields_and_the_flags_are_the_same() {
        Args::command().debug_assert();
        assert_eq!(quintlet_testkit::command_line::differences(&Args::command(), Service::CriProxy), [""; 0]);
    }

    #[test]
    fn fields_of_the_file_become_arguments() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.yaml");
        let file = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n\
                    containerRuntimeEndpoint: unix:///r.sock\nimageServiceEndpoint: unix:///i.sock\nruntimeRequestTimeout: 7s\npodLogsDir: /logs\n\
                    ---\napiVersion: quintlet.dev/v1alpha1\nkind: QuintletConfiguration\ncontainerdNamespace: n\nallowUIDs: [read=7, probe=8]\n";
        std::fs::write(&path, file).unwrap();
        let line =
            ["cri-proxy", "--config", path.to_str().unwrap(), "--image-service-endpoint", "/flag.sock"];
        let args =
            quintlet_config::read::<Args>(Service::CriProxy, line.map(Into::into).into()).unwrap().args;
        assert_eq!(args.runtime_endpoint, PathBuf::from("/r.sock"));
        assert_eq!(args.image_service_endpoint, Some("/flag.sock".into()), "a flag wins");
        assert_eq!(args.runtime_request_timeout, Duration::from_secs(7));
        assert_eq!(args.pod_logs_dir, PathBuf::from("/logs"));
        let allowed = |socket, uid| Allowed { socket, uid };
        let both = vec![allowed(CriSocket::Read, 7), allowed(CriSocket::Probe, 8)];
        assert_eq!((args.containerd_namespace.as_str(), args.allow_uid), ("n", both));
    }

    #[test]
    fn users_are_set_by_flags() {
        let line = ["cri-proxy", "--allow-uid", "read=root", "--allow-uid", "node-api=7"];
        let args =
            quintlet_config::read::<Args>(Service::CriProxy, line.map(Into::into).into()).unwrap().args;
        let allow = |socket, uid| Allowed { socket, uid };
        assert_eq!(args.allow_uid, [allow(CriSocket::Read, 0), allow(CriSocket::NodeApi, 7)]);
    }

    #[test]
    fn a_user_is_allowed_at_one_socket_by_name_or_number() {
        for bad in ["7", "read", "read=", "read=no-such-user", "reads=7", "=7", "read=-1", "read=4294967296"]
        {
            assert!(allowed(bad).is_err(), "{bad}");
        }
        assert_eq!(allowed("sync=7"), Ok(Allowed { socket: CriSocket::Sync, uid: 7 }));
    }

    #[test]
    fn endpoints_are_absolute_paths_with_or_without_scheme() {
        assert_eq!(endpoint("unix:///run/x.sock"), Ok("/run/x.sock".into()));
        assert_eq!(endpoint("/run/x.sock"), Ok("/run/x.sock".into()));
        for bad in ["", "x.sock", "unix://x.sock", "tcp://127.0.0.1:1"] {
            assert!(endpoint(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_namespace_with_characters_of_filters_is_refused() {
        assert!(namespace("k8s.io").is_ok());
        for bad in ["", "a\"b", "a,b", "a b", "a\n"] {
            assert!(namespace(bad).is_err(), "{bad:?}");
        }
    }
}
