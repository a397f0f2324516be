//! A command line with configuration files.

use std::path::Path;

use clap::{CommandFactory as _, Parser};
use quintlet_config::ConfigArgs;
use quintlet_config::diagnostics::{Diagnostic, Severity, render};
use quintlet_config::node::Origin;
use quintlet_config::table::Service;
use quintlet_config::{Exit, read};
use quintlet_testkit::command_line::differences;

/// Arguments of a service with some fields.
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    config: ConfigArgs,
    #[arg(long, default_value_t = 110)]
    max_pods: u32,
    #[arg(long, value_delimiter = ',')]
    cluster_dns: Vec<String>,
    #[arg(long, value_parser = short)]
    node_name: Option<String>,
    #[arg(long = "minimum-image-ttl-duration", default_value = "2m")]
    image_min_age: String,
    #[arg(long = "image-maximum-gc-age", default_value = "0s")]
    image_max_age: String,
}

/// A rule that only the service has.
fn short(text: &str) -> Result<String, String> {
    if text.len() < 5 { Ok(text.to_owned()) } else { Err("is too long".to_owned()) }
}

fn with(file: &str, flags: &[&str]) -> Result<Args, Exit> {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("c.yaml");
    std::fs::write(&path, file).expect("written");
    let start = ["pod-sync".into(), "--config".into(), path.into_os_string()];
    let line = start.into_iter().chain(flags.iter().map(Into::into)).collect();
    read::<Args>(Service::PodSync, line).map(|loaded| loaded.args)
}

const FILE: &str = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nmaxPods: 5\nclusterDNS: [10.0.0.1, 10.0.0.2]\n";
const OWN: &str = "---\napiVersion: quintlet.dev/v1alpha1\nkind: QuintletConfiguration\n";

#[test]
fn files_override_defaults_and_flags_override_files() {
    let plain = read::<Args>(Service::PodSync, vec!["pod-sync".into()]).expect("defaults").args;
    assert_eq!((plain.max_pods, plain.cluster_dns.len(), plain.node_name), (110, 0, None));
    let file = with(&format!("{FILE}{OWN}nodeName: n1\n"), &[]).expect("a good file");
    assert_eq!((file.max_pods, file.cluster_dns.len(), file.node_name.as_deref()), (5, 2, Some("n1")));
    let flags = with(FILE, &["--max-pods", "7", "--cluster-dns", "10.0.0.3"]).expect("a good file");
    assert_eq!((flags.max_pods, flags.cluster_dns), (7, vec!["10.0.0.3".to_owned()]));
}

#[test]
fn a_value_that_only_the_argument_rejects_is_reported_with_its_line() {
    let Err(Exit::Invalid(diagnostics)) = with(&format!("{FILE}{OWN}nodeName: far-too-long\n"), &[]) else {
        panic!("taken")
    };
    let rendered = render(&diagnostics);
    assert!(rendered.ends_with("  line 8  nodeName: \"far-too-long\": is too long\n"), "{rendered}");
    // The same value as a flag is an ordinary usage error.
    let error = with(FILE, &["--node-name", "far-too-long"]).expect_err("refused");
    assert!(matches!(&error, Exit::Clap(_)) && error.code() == 64, "{error:?}");
}

#[test]
fn a_flag_that_contradicts_the_files_is_reported_with_its_name() {
    let Err(Exit::Invalid(diagnostics)) = with(FILE, &["--cluster-dns", "nine"]) else { panic!("taken") };
    assert_eq!(
        render(&diagnostics),
        "quintlet: 1 problem in flags\n  --cluster-dns  clusterDNS[0]: \"nine\" is not an IP address\n"
    );
}

#[test]
fn the_zero_of_a_flag_is_a_value_and_that_of_a_file_is_the_default() {
    let max = ["--image-maximum-gc-age", "1m"];
    let zero = with(FILE, &[max[0], max[1], "--minimum-image-ttl-duration", "0s"]).expect("no minimum");
    assert_eq!((zero.image_min_age.as_str(), zero.image_max_age.as_str()), ("0s", "1m"));
    let Err(Exit::Invalid(diagnostics)) = with(&format!("{FILE}imageMinimumGCAge: 0s\n"), &max) else {
        panic!("taken")
    };
    let rendered = render(&diagnostics);
    assert!(rendered.contains("a maximum of 1m is below the minimum of 2m"), "{rendered}");
}

#[test]
fn help_and_print_config_exit_with_0_and_errors_with_64() {
    for (flags, code) in [
        (&["--help"][..], 0),
        (&["--print-config"], 0),
        (&["--nosuch"], 64),
        (&["--config-dir", "/nowhere"], 64),
    ] {
        assert_eq!(with(FILE, flags).expect_err("no run").code(), code, "{flags:?}");
    }
    let Err(Exit::Printed(text)) = with(FILE, &["--print-config", "--max-pods", "7"]) else { panic!("runs") };
    assert!(text.contains("maxPods: 7   # flag --max-pods\n"), "{text}");
}

#[test]
fn a_problem_of_the_machine_prevents_the_start_if_it_is_an_error_or_with_strict() {
    let problems = |severity| {
        let origin = Origin::File(Path::new("/c.yaml").into(), 3);
        vec![Diagnostic { severity, origin, path: "maxPods".to_owned(), message: "too many here".to_owned() }]
    };
    let loaded = |flags: &[&str]| {
        let line = ["pod-sync"].iter().chain(flags).map(Into::into).collect();
        read::<Args>(Service::PodSync, line).expect("defaults")
    };
    let warned = loaded(&[]).with_problems(problems(Severity::Warning)).expect("a warning");
    assert_eq!(warned.config.warnings, problems(Severity::Warning));
    for (flags, severity) in [(&[][..], Severity::Error), (&["--strict"], Severity::Warning)] {
        let refused = loaded(flags).with_problems(problems(severity)).expect_err("refused");
        assert_eq!(refused.code(), 64);
        let Exit::Invalid(diagnostics) = refused else { panic!("{refused:?}") };
        assert_eq!(
            render(&diagnostics),
            "quintlet: 1 problem in /c.yaml\n  line 3  maxPods: too many here\n"
        );
    }
}

#[test]
fn a_command_line_that_differs_from_the_table_is_detected() {
    let found = differences(&Args::command(), Service::PodSync);
    assert!(found.iter().any(|p| p == "rootDir: there is no flag --root-dir"), "{found:?}");
    assert!(found.iter().any(|p| p.starts_with("nodeName: --node-name does not have the kubelet's name")));
    assert!(!found.iter().any(|p| p.starts_with("maxPods") || p.starts_with("clusterDNS")), "{found:?}");
    let other = Args::command().mut_arg("max_pods", |arg| arg.default_value("111"));
    assert!(
        differences(&other, Service::PodSync)
            .contains(&"maxPods: default \"110\", but --max-pods has [\"111\"]".to_owned())
    );
}

#[test]
fn a_path_is_relative_to_its_file_and_in_a_flag_to_the_working_directory() {
    #[derive(Debug, Parser)]
    struct Paths {
        #[command(flatten)]
        config: ConfigArgs,
        #[arg(long)]
        kubeconfig: Option<std::path::PathBuf>,
    }
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("c.yaml");
    std::fs::write(&path, OWN.replacen("---\n", "", 1) + "kubeconfig: k/config\n").expect("written");
    let line = |flags: &[&str]| {
        let start = ["pod-sync".into(), "--config".into(), path.clone().into_os_string()];
        let line = start.into_iter().chain(flags.iter().map(Into::into)).collect();
        read::<Paths>(Service::PodSync, line).expect("good").args.kubeconfig
    };
    assert_eq!(line(&[]), Some(dir.path().join("k/config")));
    assert_eq!(line(&["--kubeconfig", "k"]).as_deref(), Some(Path::new("k")));
}
