//! What is started with which arguments, and where everything lies. Pure.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::UpArgs;

/// Where things are, resolved from the arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Layout {
    /// Lock and process ids of this supervisor.
    pub(super) control: PathBuf,
    pub(super) run_dir: PathBuf,
    pub(super) root_dir: PathBuf,
    pub(super) log_dir: PathBuf,
    pub(super) pod_logs_dir: PathBuf,
    /// Links to the containers' logs, for log collectors.
    pub(super) container_logs_dir: PathBuf,
    pub(super) manifests: PathBuf,
    /// What the node API keeps from one boot to the next.
    pub(super) cert_dir: PathBuf,
    /// Of the private containerd.
    pub(super) containerd: PathBuf,
    /// Configuration of the services, and the directory that changes it.
    pub(super) config: Option<PathBuf>,
    pub(super) config_dir: Option<PathBuf>,
}

/// Below what everything lies when the containerd is private and no directory is named.
const PRIVATE_BASE: &str = ".run";

impl Layout {
    /// `cwd` makes relative paths absolute: the services run elsewhere.
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
        Self {
            control: base.as_ref().map_or_else(|| run_dir.clone(), |base| cwd.join(base)),
            root_dir: place(&args.root_dir, "root", "/var/lib/kubelet"),
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

    /// The longest socket path below the run directory.
    pub(super) fn longest_socket(&self) -> PathBuf {
        self.run_dir.join("cri/node-api/cri.sock")
    }

    /// What belongs to the node API's user.
    pub(super) fn node_api_dir(&self) -> PathBuf {
        self.run_dir.join("node-api")
    }

    /// The node API's own copy: the file given may be for root only.
    pub(super) fn node_api_kubeconfig(&self) -> PathBuf {
        self.node_api_dir().join("kubeconfig")
    }

    pub(super) fn podsync_socket(&self) -> PathBuf {
        self.run_dir.join("podsync/podsync.sock")
    }
}

/// A service to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) name: &'static str,
    /// Its binary.
    pub(super) binary: &'static str,
    pub(super) args: Vec<OsString>,
    /// As which user and group; as the supervisor when there is none.
    pub(super) uid: Option<u32>,
}

/// The second process of cri-proxy's binary.
pub(super) const NODE_API: &str = "node-api";

/// The binaries of the five services, in start order.
pub(super) const SERVICES: [&str; 5] =
    ["cri-proxy", "pleg-service", "probe-service", "status-reporter", "pod-sync"];

/// The service that owns the pods: first to end, and the one that drains.
pub(super) const POD_SYNC: &str = "pod-sync";

/// The services in groups that end one after the other: who calls before who is called.
pub(super) const STOP_ORDER: [&[&str]; 3] =
    [&[POD_SYNC, NODE_API], &["status-reporter", "probe-service", "pleg-service"], &["cri-proxy"]];

/// What only the start of the runtime tells.
#[derive(Debug, Clone)]
pub(super) struct Runtime {
    pub(super) endpoint: String,
    pub(super) cgroup_root: String,
}

/// Whether the node API is run: it needs somebody to ask who its clients are.
pub(super) fn has_node_api(args: &UpArgs) -> bool {
    args.node_api_port != 0 && args.kubeconfig.is_some()
}

/// The five services with their arguments, and the node API where there is one. `unprivileged` is the user of the latter.
pub(super) fn services(
    args: &UpArgs,
    layout: &Layout,
    runtime: &Runtime,
    node: &str,
    unprivileged: Option<u32>,
) -> Vec<Plan> {
    let mut plans = five(args, layout, runtime, node, unprivileged);
    if has_node_api(args) {
        let mut line = Line(vec![NODE_API.into()]);
        line.configuration(args, layout);
        line.flag("--run-dir", &layout.run_dir);
        line.flag("--log-level", &args.log_level);
        line.flag("--log-format", &args.log_format);
        line.flag("--node-name", node);
        line.flag("--node-api-port", args.node_api_port.to_string());
        line.flag("--healthz-port", args.healthz_port.to_string());
        line.option("--kubeconfig", args.kubeconfig.as_ref().map(|_| layout.node_api_kubeconfig()));
        line.option("--client-ca-file", args.client_ca_file.as_ref());
        line.flag("--cert-dir", &layout.cert_dir);
        line.flag("--root-dir", &layout.root_dir);
        line.flag("--cgroup-root", &runtime.cgroup_root);
        line.flag("--pod-logs-dir", &layout.pod_logs_dir);
        plans.push(Plan { name: NODE_API, binary: "cri-proxy", args: line.0, uid: unprivileged });
    }
    plans
}

fn five(
    args: &UpArgs,
    layout: &Layout,
    runtime: &Runtime,
    node: &str,
    unprivileged: Option<u32>,
) -> Vec<Plan> {
    SERVICES
        .into_iter()
        .map(|name| {
            let mut line = Line::default();
            line.configuration(args, layout);
            line.flag("--run-dir", &layout.run_dir);
            line.flag("--log-level", &args.log_level);
            line.flag("--log-format", &args.log_format);
            line.option("--otlp-endpoint", args.otlp_endpoint.as_ref());
            if let Some(uid) = unprivileged.filter(|_| has_node_api(args)) {
                line.flag("--observer-uid", uid.to_string());
            }
            match name {
                "cri-proxy" => {
                    line.flag("--runtime-endpoint", &runtime.endpoint);
                    if let Some(uid) = unprivileged.filter(|_| has_node_api(args)) {
                        line.flag("--allow-uid", uid.to_string());
                    }
                }
                "probe-service" => line.flag("--id", "probe-0"),
                "status-reporter" => {
                    line.option("--kubeconfig", args.kubeconfig.as_ref());
                    line.flag("--node-name", node);
                }
                POD_SYNC => {
                    line.flag("--root-dir", &layout.root_dir);
                    line.flag("--manifests", &layout.manifests);
                    line.option("--manifest-url", args.manifest_url.as_ref());
                    line.option("--kubeconfig", args.kubeconfig.as_ref());
                    line.flag("--node-name", node);
                    line.flag("--cgroup-root", &runtime.cgroup_root);
                    line.flag("--pod-logs-dir", &layout.pod_logs_dir);
                    line.flag("--container-logs-dir", &layout.container_logs_dir);
                    line.option("--cluster-domain", args.cluster_domain.as_ref());
                    if args.private_containerd {
                        // Its images came by import: no registry has them, however full the disk is.
                        line.flag("--image-gc-high-threshold", "100");
                    }
                    let port = if has_node_api(args) { args.node_api_port } else { 0 };
                    line.flag("--node-api-port", port.to_string());
                }
                _ => {}
            }
            Plan { name, binary: name, args: line.0, uid: None }
        })
        .collect()
}

#[derive(Default)]
struct Line(Vec<OsString>);

impl Line {
    fn configuration(&mut self, args: &UpArgs, layout: &Layout) {
        self.option("--config", layout.config.as_ref());
        self.option("--config-dir", layout.config_dir.as_ref());
        if args.strict {
            self.0.push("--strict".into());
        }
    }

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
    fn a_private_node_lies_below_one_directory_and_a_host_agent_where_the_kubelet_does() {
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
    fn each_service_gets_its_own_arguments_only() {
        let args = args(&["--private-containerd", "--base", "/b", "--log-level", "debug"]);
        let layout = Layout::resolve(&args, Path::new("/w"));
        let plans = services(&args, &layout, &runtime(), "n1", Some(7));
        let line = |name: &str| {
            let plan = plans.iter().find(|p| p.name == name).unwrap();
            plan.args.iter().map(|a| a.to_str().unwrap()).collect::<Vec<_>>().join(" ")
        };
        let common = "--run-dir /b/run --log-level debug --log-format text";
        assert_eq!(line("cri-proxy"), format!("{common} --runtime-endpoint unix:///c.sock"));
        assert_eq!(line("pleg-service"), common);
        assert_eq!(line("probe-service"), format!("{common} --id probe-0"));
        assert_eq!(line("status-reporter"), format!("{common} --node-name n1"));
        assert_eq!(
            line("pod-sync"),
            format!(
                "{common} --root-dir /b/root --manifests /b/manifests --node-name n1 --cgroup-root /quintlet-3 \
                 --pod-logs-dir /b/pod-logs --container-logs-dir /b/container-logs --image-gc-high-threshold 100 \
                 --node-api-port 0"
            )
        );
    }

    #[test]
    fn imported_images_are_kept_and_those_of_a_runtime_of_the_host_are_not_our_choice() {
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
    fn the_configuration_is_handed_to_all() {
        let args = args(&["--config", "c.yaml", "--config-dir", "/d", "--strict", "--kubeconfig", "/k"]);
        let layout = Layout::resolve(&args, Path::new("/w"));
        for plan in services(&args, &layout, &runtime(), "n1", None) {
            let begin = usize::from(plan.name == NODE_API);
            assert_eq!(
                plan.args[begin..begin + 5],
                ["--config", "/w/c.yaml", "--config-dir", "/d", "--strict"],
                "{}",
                plan.name
            );
        }
    }

    #[test]
    fn with_an_api_server_both_that_talk_to_it_get_the_kubeconfig() {
        let args = args(&["--runtime-endpoint", "unix:///r.sock", "--kubeconfig", "/k"]);
        let layout = Layout::resolve(&args, Path::new("/w"));
        for plan in services(&args, &layout, &runtime(), "n1", Some(7)) {
            let has = plan.args.windows(2).any(|w| w == ["--kubeconfig", "/k"]);
            assert_eq!(has, ["status-reporter", "pod-sync"].contains(&plan.name), "{}", plan.name);
        }
        let plans = services(&args, &layout, &runtime(), "n1", Some(7));
        let line = |name: &str| plans.iter().find(|p| p.name == name).unwrap().args.join(OsStr::new(" "));
        assert!(line(POD_SYNC).to_str().unwrap().ends_with("--node-api-port 10250"));
        assert!(line("cri-proxy").to_str().unwrap().ends_with("--allow-uid 7"));
        let api = plans.iter().find(|p| p.name == NODE_API).unwrap();
        assert_eq!((api.binary, api.uid), ("cri-proxy", Some(7)));
        assert_eq!(
            line(NODE_API),
            "node-api --run-dir /run/quintlet --log-level info --log-format text --node-name n1 --node-api-port 10250 \
             --healthz-port 10248 --kubeconfig /run/quintlet/node-api/kubeconfig \
             --cert-dir /var/lib/quintlet/pki --root-dir /var/lib/kubelet --cgroup-root /quintlet-3 --pod-logs-dir /var/log/pods"
        );
    }

    #[test]
    fn without_an_api_server_or_a_port_there_is_no_node_api() {
        for more in [&["--kubeconfig", "/k", "--node-api-port", "0"][..], &[]] {
            let args = args(&[&["--runtime-endpoint", "unix:///r.sock"], more].concat());
            let layout = Layout::resolve(&args, Path::new("/w"));
            let plans = services(&args, &layout, &runtime(), "n1", Some(7));
            assert!(plans.iter().all(|p| p.name != NODE_API && p.uid.is_none()));
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
