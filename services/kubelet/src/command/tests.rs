use super::*;

const FILE: &str = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n\
                    staticPodPath: /etc/kubernetes/manifests\nclusterDNS: [10.96.0.10]\n";

fn run(words: &[&str]) -> Result<KubeletCommand, Exit> {
    let line = std::iter::once(&"kubelet").chain(words).map(Into::into).collect();
    match read(line)? {
        KubeletRequest::Run(line) => Ok(*line),
        KubeletRequest::Check(_) => panic!("{words:?} asks for a check"),
        KubeletRequest::Version => panic!("{words:?} asks for the version"),
    }
}

/// Returns the line of `up` without its first two words, and the arguments of services.
fn translated(file: &str, words: &[&str]) -> Result<(Vec<String>, Vec<String>), Exit> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.yaml");
    std::fs::write(&path, file).unwrap();
    let config = format!("--config={}", path.display());
    let line = run(&[&[config.as_str()], words].concat())?;
    let settings = line.load()?;
    let up = settings.up_line(&line).into_iter().skip(4).map(|word| word.into_string().unwrap());
    let extra = settings.extra().into_iter();
    let extra = extra.map(|extra| format!("{} {}", extra.service.name(), extra.argument.display()));
    Ok((up.collect(), extra.collect()))
}

#[test]
fn the_line_of_kubeadm_becomes_a_line_of_up() {
    let (up, extra) = translated(
        FILE,
        &[
            "--bootstrap-kubeconfig=/etc/kubernetes/bootstrap-kubelet.conf",
            "--kubeconfig=/etc/kubernetes/kubelet.conf",
            "--container-runtime-endpoint=unix:///run/containerd/containerd.sock",
            "--hostname-override=N1",
            "--node-ip=10.0.0.1",
            "--node-labels=a=b,c=d",
            "--register-with-taints=node-role.kubernetes.io/control-plane:NoSchedule",
            "--v=5",
        ],
    )
    .unwrap();
    assert_eq!(
        up,
        [
            "--bootstrap-kubeconfig",
            "/etc/kubernetes/bootstrap-kubelet.conf",
            "--runtime-endpoint=unix:///run/containerd/containerd.sock",
            "--kubeconfig=/etc/kubernetes/kubelet.conf",
            "--node-name=N1",
            "--log-level=debug",
        ]
    );
    assert_eq!(
        extra,
        [
            "status-reporter --register-with-taints=node-role.kubernetes.io/control-plane=:NoSchedule",
            "pod-sync --node-ip=10.0.0.1",
            "status-reporter --node-ip=10.0.0.1",
            "pod-sync --node-label=a=b",
            "status-reporter --node-label=a=b",
            "pod-sync --node-label=c=d",
            "status-reporter --node-label=c=d",
        ]
    );
}

#[test]
fn the_runtime_of_the_file_counts_and_else_the_default_of_the_kubelet() {
    let endpoint = |file: &str| {
        let (up, _) = translated(file, &[]).unwrap();
        up.into_iter().find(|word| word.starts_with("--runtime-endpoint="))
    };
    assert_eq!(endpoint(FILE).as_deref(), Some("--runtime-endpoint=unix:///run/containerd/containerd.sock"));
    assert_eq!(endpoint(&format!("{FILE}containerRuntimeEndpoint: unix:///run/crio/crio.sock\n")), None);
}

#[test]
fn switches_and_repeated_flags_are_read_as_by_the_kubelet() {
    let (up, extra) = translated(
        FILE,
        &[
            "--fail-swap-on=false",
            "--cpu-cfs-quota",
            "--max-pods=5",
            "--max-pods",
            "7",
            "-v",
            "2",
            "--cert-dir=/c",
        ],
    )
    .unwrap();
    assert_eq!(
        up.last().map(String::as_str),
        Some("--runtime-endpoint=unix:///run/containerd/containerd.sock")
    );
    assert_eq!(
        extra,
        ["pod-sync --max-pods=7", "pod-sync --cpu-cfs-quota=true", "pod-sync --fail-swap-on=false"]
    );
    let line = run(&["--cert-dir=/c"]).unwrap();
    assert_eq!(line.load().unwrap().certificates().as_deref(), Some(Path::new("/c")));
}

#[test]
fn each_flag_of_the_kubelet_has_its_verdict() {
    for row in FLAGS {
        let handled = FORWARDED.iter().any(|(name, _)| *name == row.name)
            || [VERBOSITY.0, "bootstrap-kubeconfig", "config", "config-dir", "help", "version"]
                .contains(&row.name);
        let word = format!("--{}={}", row.name, if row.is_switch { "true" } else { "1" });
        match row.support {
            FlagSupport::Refused(why) => {
                let Err(Exit::Invalid(problems)) = run(&[&word]) else { panic!("{word} is accepted") };
                assert_eq!(problems[0].text(), format!("--{}: {why}", row.name));
            }
            FlagSupport::Same | FlagSupport::Instead(_) | FlagSupport::Ignored(_) => {
                assert!(handled, "{word}")
            }
        }
    }
    let (_, extra) = translated(FILE, &["--cloud-provider=external", "--contention-profiling"]).unwrap();
    assert_eq!(extra, ["status-reporter --cloud-provider=external", "node-api --contention-profiling=true"]);
    assert_eq!(translated(FILE, &["--cloud-provider="]).unwrap().1, [""; 0]);
    // node-api warns of the flag.
    let (_, extra) = translated(FILE, &["--housekeeping-interval=30s"]).unwrap();
    assert_eq!(extra, ["node-api --housekeeping-interval=30s"]);
    for wrong in ["--no-flag-of-anybody", "--max-pods=many"] {
        assert_eq!(translated(FILE, &[wrong]).unwrap_err().code(), 64, "{wrong}");
    }
}

#[test]
fn a_check_prints_the_settings_that_another_agent_may_have() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.yaml");
    std::fs::write(&path, format!("{FILE}cgroupDriver: systemd\nhealthzPort: 0\nreadOnlyPort: 10255\n"))
        .unwrap();
    let words = ["kubelet", "--check", "--hostname-override=N1", "--port=10350", "--root-dir=/data"];
    let config = format!("--config={}", path.display());
    let line = words.into_iter().chain(Some(config.as_str())).map(Into::into).collect();
    let Ok(KubeletRequest::Check(line)) = read(line) else { panic!("no check") };
    let shared = serde_json::to_value(line.load().unwrap().shared(&line.places())).unwrap();
    assert_eq!(
        shared,
        serde_json::json!({
            "rootDir": "/data",
            "nodeName": "N1",
            "runDir": "/run/quintlet",
            "runtimeEndpoint": "unix:///run/containerd/containerd.sock",
            "cgroupDriver": "systemd",
            "runtimeCgroupDriver": null,
            "runtimeError": null,
            "ports": {"port": 10350, "readOnlyPort": 10255},
        })
    );
}

#[test]
fn the_line_of_a_node_beside_a_kubelet_names_its_own_directories() {
    let (up, extra) = translated(
        FILE,
        &[
            "--root-dir=/var/lib/quintlet-beside/root",
            "--pod-manifest-path=/var/lib/quintlet-beside/manifests",
            "--run-dir=/run/quintlet-beside",
            "--log-dir=/var/log/quintlet-beside",
            "--pod-logs-dir=/var/log/quintlet-beside/pods",
            "--container-logs-dir=/var/log/quintlet-beside/containers",
            "--cgroup-root=/quintlet-beside",
            "--hostname-override=n-quintlet",
            "--port=10350",
            "--healthz-port=10348",
            "--read-only-port=0",
            "--container-runtime-endpoint=unix:///run/other.sock",
        ],
    )
    .unwrap();
    for word in [
        "--root-dir=/var/lib/quintlet-beside/root",
        "--manifests=/var/lib/quintlet-beside/manifests",
        "--run-dir=/run/quintlet-beside",
        "--log-dir=/var/log/quintlet-beside",
        "--pod-logs-dir=/var/log/quintlet-beside/pods",
        "--cgroup-root=/quintlet-beside",
        "--node-name=n-quintlet",
        "--node-api-port=10350",
        "--healthz-port=10348",
        "--runtime-endpoint=unix:///run/other.sock",
    ] {
        assert!(up.iter().any(|given| given == word), "{word}: {up:?}");
    }
    assert_eq!(
        extra,
        ["node-api --read-only-port=0", "pod-sync --container-logs-dir=/var/log/quintlet-beside/containers"]
    );
}

#[test]
fn the_command_line_is_well_formed() {
    command().debug_assert();
    for words in
        [&["kubelet", "--version"][..], &["kubelet", "--version=true"], &["kubelet", "--version=raw"]]
    {
        let line = words.iter().map(Into::into).collect();
        assert!(matches!(read(line), Ok(KubeletRequest::Version)), "{words:?}");
    }
    assert!(run(&["--version=false"]).is_ok());
}
