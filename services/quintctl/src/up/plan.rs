//! Computes the paths of the node and the command lines of the services. Does no I/O.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::args::UpArgs;
use super::handover::{CopyKind, FileCopy};
use super::names::{NODE_API, POD_SYNC, PROBER, PROBERS, SERVICES, prober_id, service_of};
use super::users::{COPIES_DIR, Users};
use crate::run_as::User;

/// The paths of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Layout {
    /// Directory of this supervisor's lock and process IDs.
    pub(super) control: PathBuf,
    pub(super) run_dir: PathBuf,
    pub(super) root_dir: PathBuf,
    pub(super) log_dir: PathBuf,
    pub(super) pod_logs_dir: PathBuf,
    /// Links to the containers' logs, for log collectors.
    pub(super) container_logs_dir: PathBuf,
    pub(super) manifests: PathBuf,
    /// The node API's self-signed certificate, which must survive a reboot.
    pub(super) cert_dir: PathBuf,
    /// The certificates that pod-sync requests. No other service may write there.
    requested_certificates: PathBuf,
    /// Directory of the private containerd.
    pub(super) containerd: PathBuf,
    pub(super) config: Option<PathBuf>,
    /// Directory of drop-in files.
    pub(super) config_dir: Option<PathBuf>,
}

/// Default of `--base` with `--private-containerd`.
const PRIVATE_BASE: &str = ".run";

impl Layout {
    /// Resolves the paths from the options. Relative paths are relative to `cwd`.
    pub(super) fn resolve(args: &UpArgs, cwd: &Path) -> Self {
        let base = args.base.clone().or_else(|| args.private_containerd.then(|| PathBuf::from(PRIVATE_BASE)));
        let place = |given: &Option<PathBuf>, in_base: &str, system: &str| {
            let path = given
                .clone()
                .or_else(|| base.as_ref().map(|base| base.join(in_base)))
                .unwrap_or_else(|| PathBuf::from(system));
            cwd.join(path)
        };
        let run_dir = place(&args.run_dir, "run", "/run/quintlet");
        let root_dir = place(&args.root_dir, "root", "/var/lib/kubelet");
        let requested = args.requested_certificates.as_ref();
        Self {
            control: base.as_ref().map_or_else(|| run_dir.clone(), |base| cwd.join(base)),
            requested_certificates: requested.map_or_else(|| root_dir.join("pki"), |dir| cwd.join(dir)),
            root_dir,
            log_dir: place(&args.log_dir, "logs", "/var/log/quintlet"),
            pod_logs_dir: place(&args.pod_logs_dir, "pod-logs", "/var/log/pods"),
            container_logs_dir: place(&None, "container-logs", "/var/log/containers"),
            manifests: place(&args.manifests, "manifests", "/etc/kubernetes/manifests"),
            cert_dir: place(&args.cert_dir, "node-api-pki", "/var/lib/quintlet/pki"),
            containerd: place(&None, "containerd", "/run/quintlet-containerd"),
            config: args.config.as_ref().map(|path| cwd.join(path)),
            config_dir: args.config_dir.as_ref().map(|path| cwd.join(path)),
            run_dir,
        }
    }

    /// Returns the longest socket path below the run directory.
    pub(super) fn longest_socket(&self) -> PathBuf {
        self.run_dir.join("cri/node-api/cri.sock")
    }

    /// Returns the directory of the copies of files for a service.
    pub(super) fn copies_dir(&self, service: &str) -> PathBuf {
        self.run_dir.join(COPIES_DIR).join(service)
    }

    /// Returns the path of the serving certificate that pod-sync requests.
    fn issued_certificate(&self) -> PathBuf {
        self.requested_certificates.join("kubelet-server-current.pem")
    }

    pub(super) fn podsync_socket(&self) -> PathBuf {
        self.run_dir.join("podsync/podsync.sock")
    }
}

/// The command of a service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ServiceCommand {
    pub(super) name: &'static str,
    pub(super) binary: &'static str,
    pub(super) args: Vec<OsString>,
    /// User of the service; `None` for that of the supervisor.
    pub(super) user: Option<User>,
}

/// The settings that are known only after the start of the runtime.
#[derive(Debug, Clone)]
pub(super) struct Runtime {
    pub(super) endpoint: String,
    pub(super) cgroup_root: String,
}

/// Returns whether to run the node API, which needs an API server to authenticate its clients.
pub(super) fn has_node_api(args: &UpArgs) -> bool {
    args.node_api_port != 0 && args.kubeconfig.is_some()
}

/// Returns the commands of the five services and the node API, if it runs. Without `users` all run as the
/// user of the supervisor.
pub(super) fn services(
    args: &UpArgs,
    layout: &Layout,
    runtime: &Runtime,
    node: &str,
    users: Option<Users>,
) -> Vec<ServiceCommand> {
    let instances = usize::from(args.probe_instances).clamp(1, PROBERS.len());
    let processes = SERVICES.iter().flat_map(|service| match *service {
        PROBER => &PROBERS[..instances],
        _ => std::slice::from_ref(service),
    });
    let processes = processes.copied().chain(Some(NODE_API).filter(|_| has_node_api(args)));
    processes
        .map(|name| ServiceCommand {
            name,
            binary: service_of(name),
            args: arguments(name, args, layout, runtime, node, users),
            user: users.and_then(|users| users.user(service_of(name))),
        })
        .collect()
}

/// Returns the files to copy for services with users of their own.
pub(super) fn file_copies(args: &UpArgs, layout: &Layout, users: Option<Users>) -> Vec<FileCopy> {
    let mut out = Vec::new();
    for name in SERVICES.into_iter().chain(Some(NODE_API).filter(|_| has_node_api(args))) {
        let Some(user) = users.and_then(|users| users.user(name)) else { continue };
        let mut hand = |original: Option<&PathBuf>, copy: &str, kind| {
            if let Some(original) = original {
                let original = std::path::absolute(original).unwrap_or_else(|_| original.clone());
                let copy = layout.copies_dir(name).join(copy);
                out.push(FileCopy { service: name, from: original, to: copy, kind, gid: user.gid });
            }
        };
        hand(layout.config.as_ref(), CONFIG, CopyKind::Plain);
        hand(layout.config_dir.as_ref(), CONFIG_DIR, CopyKind::DropIns);
        if name == NODE_API {
            hand(args.client_ca_file.as_ref(), CLIENT_CA, CopyKind::Plain);
            hand(args.tls_cert_file.as_ref(), TLS_CERT, CopyKind::Plain);
            hand(args.tls_private_key_file.as_ref(), TLS_KEY, CopyKind::Plain);
        }
        if [REPORTER, NODE_API].contains(&name) {
            let kind = match args.bootstrap_kubeconfig {
                Some(_) => CopyKind::BootstrappedKubeconfig,
                None => CopyKind::Kubeconfig,
            };
            hand(args.kubeconfig.as_ref(), KUBECONFIG, kind);
        }
        if name == NODE_API {
            hand(Some(&layout.issued_certificate()), ISSUED, CopyKind::Issued);
        }
    }
    out
}

// File names of the copies.
const CONFIG: &str = "config.yaml";
pub(super) const CONFIG_DIR: &str = "conf.d";
const CLIENT_CA: &str = "client-ca.crt";
const TLS_CERT: &str = "tls.crt";
const TLS_KEY: &str = "tls.key";
const KUBECONFIG: &str = "kubeconfig";
const ISSUED: &str = "kubelet-server.pem";

const REPORTER: &str = "status-reporter";

fn arguments(
    process: &'static str,
    args: &UpArgs,
    layout: &Layout,
    runtime: &Runtime,
    node: &str,
    users: Option<Users>,
) -> Vec<OsString> {
    let name = service_of(process);
    let node_api = has_node_api(args);
    // A service with a user of its own may not read the originals.
    let handed = users.and_then(|users| users.user(name)).map(|_| layout.copies_dir(name));
    let readable = |given: Option<&PathBuf>, copy: &str| {
        given.map(|given| handed.as_ref().map_or_else(|| given.clone(), |dir| dir.join(copy)))
    };
    let mut line = Line::default();
    line.option("--config", readable(layout.config.as_ref(), CONFIG));
    line.option("--config-dir", readable(layout.config_dir.as_ref(), CONFIG_DIR));
    if args.strict {
        line.0.push("--strict".into());
    }
    line.flag("--run-dir", &layout.run_dir);
    line.flag("--log-level", &args.log_level);
    line.flag("--log-format", &args.log_format);
    line.option("--otlp-endpoint", args.otlp_endpoint.as_ref());
    for uid in users.iter().flat_map(|users| users.observers(name, node_api)) {
        line.flag("--observer-uid", uid.to_string());
    }
    // The service admits the user only if the configuration has an address for subscribers over TCP.
    if let Some(users) = users.filter(|users| node_api && users.uid(NODE_API) != 0)
        && ["pleg-service", PROBER, POD_SYNC].contains(&name)
    {
        line.flag("--subscriber-relay-uid", users.uid(NODE_API).to_string());
    }
    match name {
        "cri-proxy" => {
            line.flag("--runtime-endpoint", &runtime.endpoint);
            line.flag("--pod-logs-dir", &layout.pod_logs_dir);
            for (socket, uid) in users.iter().flat_map(|users| users.cri_users(node_api)) {
                line.flag("--allow-uid", format!("{socket}={uid}"));
            }
        }
        PROBER => line.option("--id", prober_id(process)),
        REPORTER => {
            line.option("--kubeconfig", readable(args.kubeconfig.as_ref(), KUBECONFIG));
            line.flag("--node-name", node);
        }
        NODE_API => {
            line.flag("--node-name", node);
            line.flag("--node-api-port", args.node_api_port.to_string());
            line.flag("--healthz-port", args.healthz_port.to_string());
            line.option("--kubeconfig", readable(args.kubeconfig.as_ref(), KUBECONFIG));
            line.option("--client-ca-file", readable(args.client_ca_file.as_ref(), CLIENT_CA));
            line.option("--tls-cert-file", readable(args.tls_cert_file.as_ref(), TLS_CERT));
            line.option("--tls-private-key-file", readable(args.tls_private_key_file.as_ref(), TLS_KEY));
            line.flag("--cert-dir", &layout.cert_dir);
            line.option("--issued-certificate-file", readable(Some(&layout.issued_certificate()), ISSUED));
            line.flag("--root-dir", &layout.root_dir);
            line.flag("--cgroup-root", &runtime.cgroup_root);
            line.flag("--pod-logs-dir", &layout.pod_logs_dir);
        }
        POD_SYNC => {
            line.flag("--root-dir", &layout.root_dir);
            line.flag("--manifests", &layout.manifests);
            line.option("--manifest-url", args.manifest_url.as_ref());
            line.option("--kubeconfig", args.kubeconfig.as_ref());
            if args.kubeconfig.is_some() {
                line.option("--bootstrap-kubeconfig", args.bootstrap_kubeconfig.as_ref());
                line.flag("--cert-dir", &layout.requested_certificates);
            }
            line.flag("--node-name", node);
            line.flag("--cgroup-root", &runtime.cgroup_root);
            line.flag("--pod-logs-dir", &layout.pod_logs_dir);
            line.flag("--container-logs-dir", &layout.container_logs_dir);
            line.option("--cluster-domain", args.cluster_domain.as_ref());
            if args.private_containerd {
                // The images were imported and cannot be pulled again, so that image garbage collection is
                // disabled.
                line.flag("--image-gc-high-threshold", "100");
            }
            if let Some(users) = users.filter(|users| node_api && users.uid(NODE_API) != 0) {
                line.flag("--allow-uid", users.uid(NODE_API).to_string());
            }
            let port = if node_api { args.node_api_port } else { 0 };
            line.flag("--node-api-port", port.to_string());
        }
        _ => {}
    }
    let extra = args.extra.iter().filter(|extra| extra.service.name() == name);
    line.0.extend(extra.map(|extra| extra.argument.clone()));
    line.0
}

#[derive(Default)]
struct Line(Vec<OsString>);

impl Line {
    fn flag(&mut self, name: &str, value: impl Into<OsString>) {
        self.0.extend([OsString::from(name), value.into()]);
    }

    fn option(&mut self, name: &str, value: Option<impl Into<OsString>>) {
        if let Some(value) = value {
            self.flag(name, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use clap::Parser;

    use super::*;
    use crate::up::names::STOP_ORDER;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        up: UpArgs,
    }

    fn args(line: &[&str]) -> UpArgs {
        Cli::try_parse_from(std::iter::once(&"up").chain(line)).unwrap().up
    }

    fn runtime() -> Runtime {
        Runtime { endpoint: "unix:///c.sock".to_owned(), cgroup_root: "/quintlet-3".to_owned() }
    }

    #[test]
    fn a_private_node_uses_one_directory_and_a_host_agent_the_kubelets_directories() {
        let private =
            Layout::resolve(&args(&["--private-containerd", "--manifests", "examples"]), Path::new("/w"));
        assert_eq!(private.root_dir, Path::new("/w/.run/root"));
        assert_eq!(private.run_dir, Path::new("/w/.run/run"));
        assert_eq!(private.container_logs_dir, Path::new("/w/.run/container-logs"));
        assert_eq!(private.control, Path::new("/w/.run"));
        assert_eq!(private.manifests, Path::new("/w/examples"));
        let agent = Layout::resolve(&args(&["--runtime-endpoint", "unix:///r.sock"]), Path::new("/w"));
        assert_eq!(agent.root_dir, Path::new("/var/lib/kubelet"));
        assert_eq!(agent.control, Path::new("/run/quintlet"));
        assert_eq!(agent.cert_dir, Path::new("/var/lib/quintlet/pki"), "not what a boot empties");
        assert_eq!(private.cert_dir, Path::new("/w/.run/node-api-pki"));
        let given = Layout::resolve(
            &args(&["--runtime-endpoint", "unix:///r.sock", "--cert-dir", "/c"]),
            Path::new("/w"),
        );
        assert_eq!(given.cert_dir, Path::new("/c"));
        assert_eq!(agent.manifests, Path::new("/etc/kubernetes/manifests"));
    }

    #[test]
    fn each_instance_of_probe_service_has_an_id_and_the_user_of_the_service() {
        let args = args(&["--private-containerd", "--config", "/etc/q.yaml", "--probe-instances", "3"]);
        let layout = Layout::resolve(&args, Path::new("/w"));
        let plans = services(&args, &layout, &runtime(), "n1", Some(Users::of(&args)));
        let probers: Vec<_> = plans.iter().filter(|plan| plan.binary == "probe-service").collect();
        let names: Vec<_> = probers.iter().map(|plan| plan.name).collect();
        assert_eq!(names, ["probe-service", "probe-service-1", "probe-service-2"]);
        for (number, plan) in probers.iter().enumerate() {
            let line = plan.args.join(OsStr::new(" ")).into_string().unwrap();
            assert!(line.ends_with(&format!("--id probe-{number}")), "{line}");
            assert!(line.contains("--config /w/.run/run/handed/probe-service/config.yaml"), "{line}");
            assert_eq!(plan.user.as_ref().map(|user| user.uid), Some(65531));
        }
        assert_eq!(plans.len(), 7);
        for wrong in ["0", "9", "many"] {
            let line = ["up", "--private-containerd", "--probe-instances", wrong];
            assert!(Cli::try_parse_from(line).is_err(), "{wrong}");
        }
    }

    #[test]
    fn each_service_gets_its_own_arguments_only() {
        let args = args(&["--private-containerd", "--base", "/b", "--log-level", "debug"]);
        let layout = Layout::resolve(&args, Path::new("/w"));
        let plans = services(&args, &layout, &runtime(), "n1", Some(Users::of(&args)));
        let line = |name: &str| {
            let plan = plans.iter().find(|p| p.name == name).unwrap();
            plan.args.iter().map(|a| a.to_str().unwrap()).collect::<Vec<_>>().join(" ")
        };
        let common = "--run-dir /b/run --log-level debug --log-format text";
        assert_eq!(
            line("cri-proxy"),
            format!(
                "{common} --runtime-endpoint unix:///c.sock --pod-logs-dir /b/pod-logs --allow-uid read=65530 \
                 --allow-uid probe=65531"
            )
        );
        assert_eq!(line("pleg-service"), format!("{common} --observer-uid 65532"));
        assert_eq!(line("probe-service"), format!("{common} --id probe-0"));
        assert_eq!(line("status-reporter"), format!("{common} --node-name n1"));
        assert_eq!(
            line("pod-sync"),
            format!(
                "{common} --observer-uid 65532 --root-dir /b/root --manifests /b/manifests --node-name n1 --cgroup-root /quintlet-3 \
                 --pod-logs-dir /b/pod-logs --container-logs-dir /b/container-logs --image-gc-high-threshold 100 \
                 --node-api-port 0"
            )
        );
    }

    #[test]
    fn imported_images_are_exempt_from_image_gc_only_in_a_private_runtime() {
        for (flags, kept) in [
            (&["--private-containerd"][..], true),
            (&["--private-containerd", "--config", "c.yaml"], true),
            (&["--runtime-endpoint", "unix:///r.sock"], false),
        ] {
            let args = args(flags);
            let layout = Layout::resolve(&args, Path::new("/w"));
            for plan in services(&args, &layout, &runtime(), "n1", None) {
                let has = plan.args.windows(2).any(|w| w == ["--image-gc-high-threshold", "100"]);
                assert_eq!(has, kept && plan.name == POD_SYNC, "{flags:?}: {}", plan.name);
            }
        }
    }

    #[test]
    fn all_services_get_the_configuration_and_services_with_own_users_get_copies() {
        let args = args(&["--config", "c.yaml", "--config-dir", "/d", "--strict", "--kubeconfig", "/k"]);
        let layout = Layout::resolve(&args, Path::new("/w"));
        for users in [None, Some(Users::of(&args))] {
            for plan in services(&args, &layout, &runtime(), "n1", users) {
                let handed = format!("/run/quintlet/handed/{}", plan.name);
                let (file, dir) = match plan.user {
                    Some(_) => (format!("{handed}/config.yaml"), format!("{handed}/conf.d")),
                    None => ("/w/c.yaml".to_owned(), "/d".to_owned()),
                };
                let want = ["--config", &file, "--config-dir", &dir, "--strict"];
                assert_eq!(plan.args[..5], want, "{}", plan.name);
            }
        }
        let copies = file_copies(&args, &layout, Some(Users::of(&args)));
        let command = |name: &str| {
            let of_service = copies.iter().filter(|c| c.service == name);
            of_service.map(|c| c.from.to_str().unwrap().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(command("pleg-service"), ["/w/c.yaml", "/d"]);
        let issued = "/var/lib/kubelet/pki/kubelet-server-current.pem";
        assert_eq!(command(NODE_API), ["/w/c.yaml", "/d", "/k", issued]);
        assert!(command("pod-sync").is_empty() && file_copies(&args, &layout, None).is_empty());
    }

    #[test]
    fn with_an_api_server_its_clients_get_the_kubeconfig_and_node_api_its_certificate() {
        let args = args(&[
            "--runtime-endpoint",
            "unix:///r.sock",
            "--kubeconfig",
            "/k",
            "--tls-cert-file",
            "/t.crt",
            "--tls-private-key-file",
            "/t.key",
            "--otlp-endpoint",
            "http://c:4317",
            "--node-api-uid",
            "7",
        ]);
        let layout = Layout::resolve(&args, Path::new("/w"));
        let users = Users::of(&args);
        let plans = services(&args, &layout, &runtime(), "n1", Some(users));
        let line = |name: &str| plans.iter().find(|p| p.name == name).unwrap().args.join(OsStr::new(" "));
        let line = |name: &str| line(name).into_string().unwrap();
        assert!(
            line("status-reporter").contains("--kubeconfig /run/quintlet/handed/status-reporter/kubeconfig")
        );
        assert!(line(POD_SYNC).contains("--kubeconfig /k"));
        assert!(line(POD_SYNC).ends_with("--allow-uid 7 --node-api-port 10250"));
        for name in ["pleg-service", "probe-service", POD_SYNC] {
            assert!(line(name).contains(" --subscriber-relay-uid 7"), "{name}");
        }
        assert!(!line(NODE_API).contains("--subscriber") && !line(REPORTER).contains("--subscriber"));
        assert!(line("cri-proxy").ends_with("--allow-uid node-api=7"));
        assert!(line("pleg-service").contains("--observer-uid 65532 --observer-uid 7"));
        let api = plans.iter().find(|p| p.name == NODE_API).unwrap();
        assert_eq!((api.binary, api.user.clone()), (NODE_API, users.user(NODE_API)));
        assert_eq!(
            line(NODE_API),
            "--run-dir /run/quintlet --log-level info --log-format text --otlp-endpoint http://c:4317 --node-name n1 --node-api-port 10250 \
             --healthz-port 10248 --kubeconfig /run/quintlet/handed/node-api/kubeconfig \
             --tls-cert-file /run/quintlet/handed/node-api/tls.crt \
             --tls-private-key-file /run/quintlet/handed/node-api/tls.key \
             --cert-dir /var/lib/quintlet/pki --issued-certificate-file /run/quintlet/handed/node-api/kubelet-server.pem --root-dir /var/lib/kubelet --cgroup-root /quintlet-3 --pod-logs-dir /var/log/pods"
        );
        let key = FileCopy {
            service: NODE_API,
            from: "/t.key".into(),
            to: "/run/quintlet/handed/node-api/tls.key".into(),
            kind: CopyKind::Plain,
            gid: 7,
        };
        assert!(file_copies(&args, &layout, Some(users)).contains(&key));
    }

    #[test]
    fn only_pod_sync_gets_the_bootstrap_token_and_the_others_wait_for_the_kubeconfig() {
        let base = ["--runtime-endpoint", "unix:///r.sock", "--bootstrap-kubeconfig", "/b"];
        assert!(
            Cli::try_parse_from(std::iter::once("up").chain(base)).is_err(),
            "it is written to --kubeconfig"
        );
        let args = args(&[&base[..], &["--kubeconfig", "/k"]].concat());
        let layout = Layout::resolve(&args, Path::new("/w"));
        let users = Some(Users::of(&args));
        for plan in services(&args, &layout, &runtime(), "n1", users) {
            let line = plan.args.join(OsStr::new(" ")).into_string().unwrap();
            let wanted = "--kubeconfig /k --bootstrap-kubeconfig /b --cert-dir /var/lib/kubelet/pki";
            assert_eq!(line.contains(wanted), plan.name == POD_SYNC, "{line}");
            assert_eq!(line.contains("/b "), plan.name == POD_SYNC, "{line}");
        }
        let copies = file_copies(&args, &layout, users);
        let kinds: Vec<_> = copies.iter().map(|copy| (copy.service, copy.kind)).collect();
        assert_eq!(
            kinds,
            [
                (REPORTER, CopyKind::BootstrappedKubeconfig),
                (NODE_API, CopyKind::BootstrappedKubeconfig),
                (NODE_API, CopyKind::Issued)
            ]
        );
    }

    #[test]
    fn without_an_api_server_or_a_port_there_is_no_node_api() {
        for more in [&["--kubeconfig", "/k", "--node-api-port", "0"][..], &[]] {
            let args = args(&[&["--runtime-endpoint", "unix:///r.sock"], more].concat());
            let layout = Layout::resolve(&args, Path::new("/w"));
            let plans = services(&args, &layout, &runtime(), "n1", Some(Users::of(&args)));
            assert!(plans.iter().all(|p| p.name != NODE_API));
        }
    }

    #[test]
    fn every_service_is_stopped_once() {
        let mut stopped: Vec<&str> = STOP_ORDER.concat();
        let mut all = [&SERVICES[..], &[NODE_API]].concat();
        stopped.sort_unstable();
        all.sort_unstable();
        assert_eq!(stopped, all);
    }
}
