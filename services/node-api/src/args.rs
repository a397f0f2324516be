//! The command line. Flags have the names of the kubelet's flags and the defaults of a kubelet with a
//! configuration file. Fields of that file replace the defaults.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Parser};
use quintlet_config::ConfigArgs;
use quintlet_kit::args::{CommonArgs, NodeArgs};

/// How requests are authorized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Mode {
    /// By SubjectAccessReviews of the API server.
    #[value(name = "Webhook")]
    Webhook,
    /// Every authenticated request is allowed.
    #[value(name = "AlwaysAllow")]
    AlwaysAllow,
}

/// Serves the kubelet's HTTPS API: logs, exec, attach, port-forward, pods, statistics and metrics. Needs
/// neither root nor the runtime's socket.
#[derive(Debug, Clone, Parser)]
#[command(name = "node-api", version)]
pub struct NodeApiArgs {
    /// Name of the node and the kubeconfig.
    #[command(flatten)]
    pub node: NodeArgs,
    /// Serve HTTPS and, if it has a port, the read-only API. If false, only the health endpoint is served
    #[arg(long, action = ArgAction::Set, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", default_value_t = true)]
    pub enable_server: bool,
    /// Address for HTTPS
    #[arg(long, value_name = "IP", default_value = "0.0.0.0")]
    pub address: IpAddr,
    /// Port for HTTPS; 0 selects a free port
    #[arg(long, alias = "port", value_name = "PORT", default_value_t = 10250)]
    pub node_api_port: u16,
    /// Port for health, metrics, statistics and pods without TLS and without authentication; 0 disables it
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    pub read_only_port: u16,
    /// Address of the health endpoint without TLS
    #[arg(long, value_name = "IP", default_value = "127.0.0.1")]
    pub healthz_bind_address: IpAddr,
    /// Port of the health endpoint without TLS; 0 disables it
    #[arg(long, value_name = "PORT", default_value_t = 10248)]
    pub healthz_port: u16,
    /// CA bundle that verifies client certificates; reloaded when it changes
    #[arg(long, value_name = "FILE")]
    pub client_ca_file: Option<PathBuf>,
    /// Authenticate bearer tokens by TokenReviews of the API server
    #[arg(long, action = ArgAction::Set, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", default_value_t = true)]
    pub authentication_token_webhook: bool,
    /// How long the result of a TokenReview is cached
    #[arg(long, value_name = "DURATION", default_value = "2m", value_parser = humantime::parse_duration)]
    pub authentication_token_webhook_cache_ttl: Duration,
    /// Admit requests without credentials, as system:anonymous
    #[arg(long, action = ArgAction::Set, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", default_value_t = false)]
    pub anonymous_auth: bool,
    /// Authorization mode: Webhook asks the API server, AlwaysAllow allows every authenticated request
    #[arg(long, value_enum, value_name = "MODE", default_value_t = Mode::Webhook)]
    pub authorization_mode: Mode,
    /// How long an allowed SubjectAccessReview is cached
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = humantime::parse_duration)]
    pub authorization_webhook_cache_authorized_ttl: Duration,
    /// How long a denied SubjectAccessReview is cached
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = humantime::parse_duration)]
    pub authorization_webhook_cache_unauthorized_ttl: Duration,
    /// Serving certificate with its chain; reloaded when it changes. Default: a self-signed certificate in
    /// --cert-dir
    #[arg(long, value_name = "FILE")]
    pub tls_cert_file: Option<PathBuf>,
    /// Key of the serving certificate
    #[arg(long, value_name = "FILE")]
    pub tls_private_key_file: Option<PathBuf>,
    /// Serve the certificate that pod-sync requests from the API server. TLS handshakes fail until there is
    /// one
    #[arg(long, action = ArgAction::Set, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", default_value_t = false)]
    pub rotate_server_certificates: bool,
    /// The certificate that pod-sync requests, with its key
    /// [default: kubelet-server-current.pem in --cert-dir]
    #[arg(long, value_name = "FILE")]
    pub issued_certificate_file: Option<PathBuf>,
    /// Directory of the self-signed certificate
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kubelet/pki")]
    pub cert_dir: PathBuf,
    /// Oldest TLS version: VersionTLS12 or VersionTLS13. Default: VersionTLS12
    #[arg(long, value_name = "VERSION", default_value = "")]
    pub tls_min_version: String,
    /// Cipher suites of TLS 1.2 by their IANA names; insecure ones are ignored. Default: all secure suites
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
    /// Let clients of /logs/ query files and the journal by service, time and pattern
    #[arg(long, action = ArgAction::Set, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", default_value_t = false)]
    pub enable_system_log_query: bool,
    /// Set the verbosity of log lines by PUT requests to /debug/flags/v
    #[arg(long, action = ArgAction::Set, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", default_value_t = true)]
    pub enable_debug_flags_handler: bool,
    /// Serve profiles of this process at /debug/pprof/
    #[arg(long, action = ArgAction::Set, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", default_value_t = true)]
    pub enable_profiling_handler: bool,
    /// Directory that is served at /logs/
    #[arg(long, value_name = "DIR", default_value = "/var/log")]
    pub system_log_dir: PathBuf,
    /// Feature gate, `Name=true`. May be repeated. Gates with an effect here: PodLogsQuerySplitStreams lets
    /// readers of container logs select stdout or stderr; ContainerCheckpoint=false disables /checkpoint;
    /// KubeletAllocatedPodsEndpoint serves /allocatedPods; HugepageAwareEviction counts huge pages in the
    /// statistics of memory
    #[arg(long, value_delimiter = ',', value_name = "GATE")]
    pub feature_gates: Vec<String>,
    /// Root directory of the node, for statistics of its file system
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kubelet")]
    pub root_dir: PathBuf,
    /// Cgroup that contains `kubepods`, for statistics of all pods together
    #[arg(long, default_value = "/", value_name = "CGROUP")]
    pub cgroup_root: String,
    /// Cgroup of the services, for statistics. Not set: the cgroup in which node-api runs
    #[arg(long, default_value = "", hide_default_value = true, value_name = "CGROUP")]
    pub kubelet_cgroups: String,
    /// Cgroup of the runtime, for statistics
    #[arg(long, default_value = "", hide_default_value = true, value_name = "CGROUP")]
    pub runtime_cgroups: String,
    /// Cgroup of processes that belong neither to the node agent nor to pods, for statistics
    #[arg(long, default_value = "", hide_default_value = true, value_name = "CGROUP")]
    pub system_cgroups: String,
    /// Directory of container logs, for statistics of their size
    #[arg(long, value_name = "DIR", default_value = "/var/log/pods")]
    pub pod_logs_dir: PathBuf,
    /// Address and port that serve subscribers over TCP, with mutual TLS. Not set: none
    #[arg(long, value_name = "ADDR")]
    pub subscriber_listen: Option<SocketAddr>,
    /// Serving certificate for subscribers with its chain; reloaded when it changes
    #[arg(long, value_name = "FILE")]
    pub subscriber_cert_file: Option<PathBuf>,
    /// Key of --subscriber-cert-file
    #[arg(long, value_name = "FILE")]
    pub subscriber_key_file: Option<PathBuf>,
    /// CA bundle that verifies the certificates of subscribers; reloaded when it changes
    #[arg(long, value_name = "FILE")]
    pub subscriber_client_ca_file: Option<PathBuf>,
    /// Common name of a certificate whose client may subscribe over TCP. May be repeated
    #[arg(long, value_name = "NAME")]
    pub subscriber_name: Vec<String>,
    /// Directories and telemetry, as for every service.
    #[command(flatten)]
    pub common: CommonArgs,
    /// Configuration files and their precedence over flags.
    #[command(flatten)]
    pub config: ConfigArgs,
}

impl NodeApiArgs {
    /// Returns whether a feature gate is on. The last occurrence of a gate applies.
    #[must_use]
    pub fn has_gate(&self, name: &str, default: bool) -> bool {
        quintlet_config::table::has_gate_or(&self.feature_gates, name, default)
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;
    use quintlet_config::table::Service;

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
    fn the_last_occurrence_of_a_feature_gate_applies() {
        let args = |flags: &[&str]| NodeApiArgs::parse_from([&["node-api"], flags].concat());
        assert!(!args(&[]).has_gate("A", false));
        assert!(args(&[]).has_gate("A", true));
        assert!(args(&["--feature-gates=B=false,A=true"]).has_gate("A", false));
        for default in [false, true] {
            assert!(!args(&["--feature-gates=A=true", "--feature-gates=A=false"]).has_gate("A", default));
        }
    }

    #[test]
    fn flags_and_files_together_have_all_that_the_port_for_subscribers_needs() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.yaml");
        let file = "apiVersion: quintlet.dev/v1alpha1\nkind: QuintletConfiguration\nsubscribers: {tls: {listen: '[::]:9', \
                    certFile: /c, keyFile: /k, clientCAFile: /a, names: [x]}}\n";
        std::fs::write(&path, file).unwrap();
        let read = |flags: &[&str]| {
            let line = ["node-api"].iter().chain(flags).map(Into::into).collect();
            quintlet_config::read::<NodeApiArgs>(Service::NodeApi, line).map(|loaded| loaded.args)
        };
        let config = format!("--config={}", path.display());
        let args = read(&[&config, "--subscriber-cert-file=/other"]).unwrap();
        assert_eq!(args.subscriber_cert_file, Some("/other".into()));
        let args = read(&[&config, "--subscriber-listen=[::1]:8"]).unwrap();
        assert_eq!(args.subscriber_listen, Some("[::1]:8".parse().unwrap()));
        for (flag, needed) in [
            ("--subscriber-listen=[::1]:8", "needs subscribers.tls.certFile"),
            ("--subscriber-name=x", "needs subscribers.tls.listen"),
        ] {
            let quintlet_config::Exit::Invalid(problems) = read(&[flag]).unwrap_err() else {
                panic!("{flag}");
            };
            assert!(problems.iter().any(|problem| problem.message == needed), "{problems:?}");
        }
    }

    #[test]
    fn fields_of_the_file_become_arguments() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.yaml");
        let file = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nenableServer: false\n\
                    address: 10.0.0.1\nport: 1\nreadOnlyPort: 2\nhealthzPort: 3\nhealthzBindAddress: 10.0.0.2\n\
                    tlsCertFile: a.crt\ntlsPrivateKeyFile: a.key\ntlsCipherSuites: [TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256, TLS_AES_128_GCM_SHA256]\ntlsMinVersion: VersionTLS13\n\
                    tlsCurvePreferences: [29, 23]\nauthentication:\n  x509: {clientCAFile: ca.crt}\n  \
                    webhook: {enabled: false, cacheTTL: 4s}\n  anonymous: {enabled: true}\n\
                    serverTLSBootstrap: true\nauthorization: {mode: AlwaysAllow, webhook: {cacheAuthorizedTTL: 5s, cacheUnauthorizedTTL: 6s}}\n\
                    enableDebuggingHandlers: false\nenableDebugFlagsHandler: false\nenableProfilingHandler: false\nenableSystemLogHandler: false\nenableSystemLogQuery: false\ncgroupRoot: /g\nkubeletCgroups: /a\nsystemCgroups: /s\npodLogsDir: /logs\n---\n\
                    apiVersion: quintlet.dev/v1alpha1\nkind: QuintletConfiguration\nkubeconfig: /k\nnodeName: n\n\
                    rootDir: /root\ncertDir: /pki\nruntimeCgroups: /r\n";
        std::fs::write(&path, file).unwrap();
        let line = ["node-api", "--config", path.to_str().unwrap(), "--port", "9"].map(Into::into);
        let args = quintlet_config::read::<NodeApiArgs>(Service::NodeApi, line.into()).unwrap().args;
        assert!(!args.enable_server && !args.enable_debugging_handlers && !args.enable_system_log_handler);
        assert!(!args.enable_debug_flags_handler && !args.enable_profiling_handler);
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
        assert_eq!((args.pod_logs_dir, args.node.kubeconfig), (logs, Some(kubeconfig)));
        assert_eq!((args.cgroup_root.as_str(), args.rotate_server_certificates), ("/g", true));
        let cgroups = [args.kubelet_cgroups, args.runtime_cgroups, args.system_cgroups];
        assert_eq!(cgroups, ["/a", "/r", "/s"]);
        assert_eq!((args.root_dir, args.cert_dir, args.node.node_name.as_deref()), (root, certs, Some("n")));
    }
}
