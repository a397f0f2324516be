//! The command line of a node beside a kubelet.

use crate::args::InstallArgs;
use crate::machine::Machine;
use crate::places::BESIDE_RUN_DIR;

/// Returns the command line of a node beside a kubelet. Each directory and port differs from those of a
/// kubelet.
pub(crate) fn arguments(args: &InstallArgs, machine: &Machine) -> Vec<String> {
    let name = args.node_name.clone().unwrap_or_else(|| format!("{}-quintlet", machine.host_name));
    let mut line = vec![
        "--root-dir=/var/lib/quintlet-beside/root".to_owned(),
        "--pod-manifest-path=/var/lib/quintlet-beside/manifests".to_owned(),
        format!("--run-dir={BESIDE_RUN_DIR}"),
        "--log-dir=/var/log/quintlet-beside".to_owned(),
        "--pod-logs-dir=/var/log/quintlet-beside/pods".to_owned(),
        "--container-logs-dir=/var/log/quintlet-beside/containers".to_owned(),
        // A kubelet removes cgroups of pods below its own root that are not its own.
        "--cgroup-root=/quintlet-beside".to_owned(),
        format!("--hostname-override={name}"),
        format!("--port={}", args.port),
        format!("--healthz-port={}", args.healthz_port),
        "--read-only-port=0".to_owned(),
    ];
    line.extend(args.runtime_endpoint.iter().map(|url| format!("--container-runtime-endpoint={url}")));
    let files = [
        ("--config", &args.config),
        ("--kubeconfig", &args.kubeconfig),
        ("--bootstrap-kubeconfig", &args.bootstrap_kubeconfig),
    ];
    for (flag, path) in files {
        if let Some(path) = path {
            let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
            line.push(format!("{flag}={}", path.display()));
        }
    }
    line
}
