//! The command line. Flags bear the kubelet's names and have its defaults for a node with a configuration file; fields of
//! that file are their defaults.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Parser};
use quintlet_config::ConfigArgs;
use quintlet_kit::args::CommonArgs;

/// How it is decided who may do what.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Mode {
    /// By the API server.
    #[value(name = "Webhook")]
    Webhook,
    /// Whoever shows who they are may do everything.
    #[value(name = "AlwaysAllow")]
    AlwaysAllow,
}

/// The node's HTTPS API: logs, exec, attach, port-forward, pods, statistics and metrics. Needs neither root nor the
/// runtime's socket; asks cri-proxy and pod-sync.
#[derive(Debug, Clone, Parser)]
#[command(name = "node-api", version)]
pub struct NodeApiArgs {
    /// Name of the node. Default: the host's name in lower case
    #[arg(long, alias = "hostname-override", value_parser = quintlet_kit::args::node_name, value_name = "NAME")]
    pub node_name: Option<String>,
    /// Serve HTTPS and, if it has a port, the read-only API; without it there is health alone
    #[arg(long, action = ArgAction::Set, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", default_value_t = true)]
    pub enable_server: bool,
    /// Address to serve HTTPS on
    #[arg(long, value_name = "IP", default_value = "0.0.0.0")]
    pub address: IpAddr,
    /// Port to serve HTTPS on; 0 takes a free one
    #[arg(long, alias = "port", value_name = "PORT", default_value_t = 10250)]
    pub node_api_port: u16,
    /// Port to serve health, metrics, statistics and pods on without TLS and without authentication; 0 for none
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    pub read_only_port: u16,
    /// Address of the plain health endpoint
    #[arg(long, value_name = "IP", default_value = "127.0.0.1")]
    pub healthz_bind_address: IpAddr,
    /// Port of the plain health endpoint; 0 for none
    #[arg(long, value_name = "PORT", default_value_t = 10248)]
    pub healthz_port: u16,
    /// API server access, for token and access reviews
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// CA bundle that client certificates are verified with; read again when it changes
    #[arg(long, value_name = "FILE")]
    pub client_ca_file: Option<PathBuf>,
    /// Ask the API server about bearer tokens
    #[arg(long, action = ArgAction::Set, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", default_value_t = true)]
    pub authentication_token_webhook: bool,
    /// How long an answer about a token counts
    #[arg(long, value_name = "DURATION", default_value = "2m", value_parser = humantime::parse_duration)]
    pub authentication_token_webhook_cache_ttl: Duration,
    /// Let requests without credentials in, as system:anonymous
    #[arg(long, action = ArgAction::Set, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", default_value_t = false)]
    pub anonymous_auth: bool,
    /// Who may do what: Webhook asks the API server, AlwaysAllow nobody
    #[arg(long, value_enum, value_name = "MODE", default_value_t = Mode::Webhook)]
    pub authorization_mode: Mode,
    /// How long the API server's yes counts
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = humantime::parse_duration)]
    pub authorization_webhook_cache_authorized_ttl: Duration,
    /// How long the API server's no counts
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = humantime::parse_duration)]
    pub authorization_webhook_cache_unauthorized_ttl: Duration,
    /// Serving certificate with its chain; read again when it changes. Default: a self-signed one in --cert-dir
    #[arg(long, value_name = "FILE")]
    pub tls_cert_file: Option<PathBuf>,
    /// Key of the serving certificate
    #[arg(long, value_name = "FILE")]
    pub tls_private_key_file: Option<PathBuf>,
    /// Where a self-signed certificate is kept
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kubelet/pki")]
    pub cert_dir: PathBuf,
    /// Oldest TLS version: VersionTLS12 or VersionTLS13. Default: the former
    #[arg(long, value_name = "VERSION", default_value = "")]
    pub tls_min_version: String,
    /// TLS 1.2 cipher suites by their IANA names; those that are unsafe are left out. Default: all that are safe
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub tls_cipher_suites: Vec<String>,
    /// Key exchange groups by their IANA numbers: 29 (X25519), 23 (P-256), 24 (P-384). Default: all
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',')]
    pub tls_curve_preferences: Vec<u16>,
    /// Serve logs, exec, attach, port-forward, run and runningpods
    #[arg(long, action = ArgAction::Set, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", default_value_t = true)]
    pub enable_debugging_handlers: bool,
    /// Serve the files of --system-log-dir at /logs/
    #[arg(long, action = ArgAction::Set, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", default_value_t = true)]
    pub enable_system_log_handler: bool,
    /// Let clients of /logs/ query files and the journal of services by name, time and pattern
    #[arg(long, action = ArgAction::Set, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", default_value_t = false)]
    pub enable_system_log_query: bool,
    /// What /logs/ shows
    #[arg(long, value_name = "DIR", default_value = "/var/log")]
    pub system_log_dir: PathBuf,
    /// A feature gate, `Name=true`; may be given more than once. PodLogsQuerySplitStreams can be set: readers of container logs
    /// may then choose stdout or stderr. ContainerCheckpoint=false: /checkpoint is not there
    #[arg(long, value_delimiter = ',', value_name = "GATE")]
    pub feature_gates: Vec<String>,
    /// The node's root directory, for the statistics of its file system
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kubelet")]
    pub root_dir: PathBuf,
    /// Cgroup under which `kubepods` stands, for the statistics of all pods together
    #[arg(long, default_value = "/", value_name = "CGROUP")]
    pub cgroup_root: String,
    /// Where containers' logs are, for the statistics of their size
    #[arg(long, value_name = "DIR", default_value = "/var/log/pods")]
    pub pod_logs_dir: PathBuf,
    /// What every service has.
    #[command(flatten)]
    pub common: CommonArgs,
    /// Where the configuration is.
    #[command(flatten)]
    pub config: ConfigArgs,
}

impl NodeApiArgs {
    /// Whether a feature gate is on; the last word counts, and without any `default`.
    #[must_use]
    pub fn has_gate(&self, name: &str, default: bool) -> bool {
        let mut of_gate =
            self.feature_gates.iter().filter_map(|g| g.split_once('=')).filter(|(k, _)| *k == name);
        of_gate.next_back().map_or(default, |(_, value)| value.eq_ignore_ascii_case("true"))
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;
    use quintlet_config::Service;

    use super::*;

    #[test]
    fn the_table_of_fields_and_the_flags_are_the_same() {
        NodeApiArgs::command().debug_assert();
        assert_eq!(
            quintlet_testkit::command_line::differences(&NodeApiArgs::command(), Service::NodeApi),
            [""; 0]
        );
    }

    #[test]
    fn a_gate_counts_as_it_was_said_last() {
        let args = |flags: &[&str]| NodeApiArgs::parse_from([&["node-api"], flags].concat());
        assert!(!args(&[]).has_gate("A", false));
        assert!(args(&[]).has_gate("A", true));
        assert!(args(&["--feature-gates=B=false,A=true"]).has_gate("A", false));
        for default in [false, true] {
            assert!(!args(&["--feature-gates=A=true", "--feature-gates=A=false"]).has_gate("A", default));
        }
    }

    #[test]
    fn fields_of_the_node_api_arrive() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.yaml");
        let file = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nenableServer: false\n\
                    address: 10.0.0.1\nport: 1\nreadOnlyPort: 2\nhealthzPort: 3\nhealthzBindAddress: 10.0.0.2\n\
                    tlsCertFile: a.crt\ntlsPrivateKeyFile: a.key\ntlsCipherSuites: [TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256, TLS_AES_128_GCM_SHA256]\ntlsMinVersion: VersionTLS13\n\
                    tlsCurvePreferences: [29, 23]\nauthentication:\n  x509: {clientCAFile: ca.crt}\n  \
                    webhook: {enabled: false, cacheTTL: 4s}\n  anonymous: {enabled: true}\n\
                    authorization: {mode: AlwaysAllow, webhook: {cacheAuthorizedTTL: 5s, cacheUnauthorizedTTL: 6s}}\n\
                    enableDebuggingHandlers: false\nenableSystemLogHandler: false\nenableSystemLogQuery: false\ncgroupRoot: /g\npodLogsDir: /logs\n---\n\
                    apiVersion: quintlet.dev/v1alpha1\nkind: QuintletConfiguration\nkubeconfig: /k\nnodeName: n\n\
                    rootDir: /root\ncertDir: /pki\n";
        std::fs::write(&path, file).unwrap();
        let line = ["node-api", "--config", path.to_str().unwrap(), "--port", "9"].map(Into::into);
        let args = quintlet_config::cli::read::<NodeApiArgs>(Service::NodeApi, line.into()).unwrap().args;
        assert!(!args.enable_server && !args.enable_debugging_handlers && !args.enable_system_log_handler);
        assert_eq!((args.address, args.node_api_port), ([10, 0, 0, 1].into(), 9), "a flag wins");
        assert_eq!((args.read_only_port, args.healthz_port), (2, 3));
        assert_eq!(args.healthz_bind_address, IpAddr::from([10, 0, 0, 2]));
        assert_eq!(args.tls_cert_file, Some(dir.path().join("a.crt")), "relative to the file");
        assert_eq!(args.tls_private_key_file, Some(dir.path().join("a.key")));
        assert_eq!(
            args.tls_cipher_suites,
            ["TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256", "TLS_AES_128_GCM_SHA256"]
        );
        assert_eq!(
            (args.tls_min_version.as_str(), args.tls_curve_preferences),
            ("VersionTLS13", vec![29, 23])
        );
        assert_eq!(args.client_ca_file, Some(dir.path().join("ca.crt")));
        assert!(!args.authentication_token_webhook && args.anonymous_auth);
        assert_eq!(args.authentication_token_webhook_cache_ttl, Duration::from_secs(4));
        assert_eq!(args.authorization_mode, Mode::AlwaysAllow);
        assert_eq!(args.authorization_webhook_cache_authorized_ttl, Duration::from_secs(5));
        assert_eq!(args.authorization_webhook_cache_unauthorized_ttl, Duration::from_secs(6));
        let [logs, kubeconfig, root, certs] = ["/logs", "/k", "/root", "/pki"].map(PathBuf::from);
        assert_eq!((args.pod_logs_dir, args.kubeconfig), (logs, Some(kubeconfig)));
        assert_eq!(args.cgroup_root, "/g");
        assert_eq!((args.root_dir, args.cert_dir, args.node_name.as_deref()), (root, certs, Some("n")));
    }
}
