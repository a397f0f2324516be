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

    pub(super) fn podsync_socket(&self) -> PathBuf {
        self.run_dir.join("podsync/podsync.sock")
    }
}

/// A service to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) name: &'static str,
    pub(super) args: Vec<OsString>,
}

/// The binaries of the five services, in start order.
pub(super) const SERVICES: [&str; 5] =
    ["cri-proxy", "pleg-service", "probe-service", "status-reporter", "pod-sync"];

/// The service that owns the pods: first to end, and the one that drains.
pub(super) const POD_SYNC: &str = "pod-sync";

/// The services in groups that end one after the other: who calls before who is called.
pub(super) const STOP_ORDER: [&[&str]; 3] =
    [&[POD_SYNC], &["status-reporter", "probe-service", "pleg-service"], &["cri-proxy"]];

/// What only the start of the runtime tells.
#[derive(Debug, Clone)]
pub(super) struct Runtime {
    pub(super) endpoint: String,
    pub(super) cgroup_root: String,
}

/// The five services with their arguments.
pub(super) fn services(args: &UpArgs, layout: &Layout, runtime: &Runtime, node: &str) -> Vec<Plan> {
    SERVICES
        .into_iter()
        .map(|name| {
            let mut line = Line::default();
            line.option("--config", layout.config.as_ref());
            line.option("--config-dir", layout.config_dir.as_ref());
            if args.strict {
                line.0.push("--strict".into());
            }
            line.flag("--run-dir", &layout.run_dir);
            line.flag("--log-level", &args.log_level);
            line.flag("--log-format", &args.log_format);
            line.option("--otlp-endpoint", args.otlp_endpoint.as_ref());
            match name {
                "cri-proxy" => line.flag("--runtime-endpoint", &runtime.endpoint),
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
                }
                _ => {}
            }
            Plan { name, args: line.0 }
        })
        .collect()
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
        assert_eq!(agent.manifests, Path::new("/etc/kubernetes/manifests"));
    }

    #[test]
    fn each_service_gets_its_own_arguments_only() {
        let args = args(&["--private-containerd", "--base", "/b", "--log-level", "debug"]);
        let layout = Layout::resolve(&args, Path::new("/w"));
        let plans = services(&args, &layout, &runtime(), "n1");
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
                 --pod-logs-dir /b/pod-logs --container-logs-dir /b/container-logs"
            )
        );
    }

    #[test]
    fn the_configuration_is_handed_to_all_five() {
        let args = args(&["--config", "c.yaml", "--config-dir", "/d", "--strict"]);
        let layout = Layout::resolve(&args, Path::new("/w"));
        for plan in services(&args, &layout, &runtime(), "n1") {
            assert_eq!(
                plan.args[..5],
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
        for plan in services(&args, &layout, &runtime(), "n1") {
            let has = plan.args.windows(2).any(|w| w == ["--kubeconfig", "/k"]);
            assert_eq!(has, ["status-reporter", "pod-sync"].contains(&plan.name), "{}", plan.name);
        }
    }

    #[test]
    fn every_service_is_stopped_once() {
        let mut stopped: Vec<&str> = STOP_ORDER.concat();
        let mut all = SERVICES.to_vec();
        stopped.sort_unstable();
        all.sort_unstable();
        assert_eq!(stopped, all);
    }
}
