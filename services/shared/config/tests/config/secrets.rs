//! Values that are secret stay out of all messages.

use std::ffi::OsString;

use clap::Parser;
use quintlet_config::ConfigArgs;
use quintlet_config::diagnostics::render;
use quintlet_config::table::Service;
use quintlet_config::{Exit, read};
use quintlet_testkit::logs::{Lines, capture};

const SECRET: &str = "s3cret";
const FILE: &str = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";

/// Arguments with headers that may have a credential.
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    config: ConfigArgs,
    #[arg(long, value_name = "HEADER", value_parser = header)]
    manifest_url_header: Vec<String>,
    #[arg(long, default_value_t = 110)]
    max_pods: u32,
}

fn header(text: &str) -> Result<String, &'static str> {
    if text.contains(':') { Ok(text.to_owned()) } else { Err("want `Name: value`") }
}

// The message with which a service with this configuration file and these flags does not start.
fn refusal(file: &str, flags: &[&str]) -> String {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("c.yaml");
    std::fs::write(&path, format!("{FILE}{file}")).expect("written");
    let start = ["pod-sync".into(), "--config".into(), path.into_os_string()];
    match read::<Args>(Service::PodSync, start.into_iter().chain(flags.iter().map(Into::into)).collect()) {
        Err(Exit::Clap(error)) => error.to_string(),
        Err(Exit::Invalid(diagnostics)) => render(&diagnostics),
        Err(Exit::Printed(text)) => text,
        Ok(loaded) => panic!("accepted: {:?}", loaded.args),
    }
}

#[test]
fn a_header_for_the_manifest_url_is_in_no_message_about_it() {
    for (file, flags, want) in [
        (String::new(), vec!["--manifest-url-header", "Bearer s3cret"], "want `Name: value`"),
        (
            String::new(),
            vec!["--manifest-url-header=Bearer s3cret"],
            "invalid value '<masked>' for '--manifest-url-header",
        ),
        (
            format!("staticPodURLHeader: {{Authorization: Bearer {SECRET}}}\n"),
            vec![],
            "line 3  staticPodURLHeader.Authorization: <masked>: must be a map of lists of text, e.g. {Name: [value]}",
        ),
        (
            format!("staticPodURLHeader: {SECRET}\n"),
            vec![],
            "line 3  staticPodURLHeader: <masked>: must be a map of",
        ),
        (
            format!("staticPodURLHeader: {{Authorization: [{{a: {SECRET}}}]}}\n"),
            vec![],
            "staticPodURLHeader.Authorization[0]: <masked>: must be",
        ),
        (
            String::new(),
            vec!["--manifest-url-header", "Authorization: s3cret", "--print-config"],
            "Authorization:\n  - \"<masked>\"",
        ),
    ] {
        let refusal = refusal(&file, &flags);
        assert!(refusal.contains(want), "{want}\n{refusal}");
        assert!(!refusal.contains(SECRET), "{refusal}");
    }
    assert!(refusal("maxPods: many\n", &[]).contains("\"many\""), "other values are shown");
    assert!(refusal("", &["--max-pods", "many"]).contains("'many'"), "other values are shown");
}

#[test]
fn the_configuration_is_logged_at_the_start_without_secrets() {
    let flags = ["pod-sync", "--manifest-url-header", "Authorization: s3cret", "--max-pods=7"];
    let loaded = read::<Args>(Service::PodSync, flags.map(OsString::from).to_vec());
    let lines = Lines::default();
    let log = capture("pod-sync", tracing::Level::INFO, &lines);
    tracing::dispatcher::with_default(&log, || loaded.expect("good flags").publish());
    let lines = lines.all();
    let logged = lines.iter().find(|line| line.contains("using configuration")).expect("a line");
    for want in ["\\\"maxPods\\\":7", "\\\"Authorization\\\":[\\\"<masked>\\\"]"] {
        assert!(logged.contains(want), "{want}\n{logged}");
    }
    assert!(lines.iter().all(|line| !line.contains(SECRET)), "{lines:?}");
}

#[test]
fn a_masked_value_keeps_its_form_so_that_the_printed_configuration_parses() {
    let printed = refusal(&format!("staticPodURLHeader: {{A: [], B: [{SECRET}]}}\n"), &["--print-config"]);
    assert!(printed.contains("A: []") && printed.contains("B:\n  - \"<masked>\""), "{printed}");
    assert!(!printed.contains(SECRET), "{printed}");
    let fields =
        printed.lines().filter(|line| !line.starts_with("apiVersion:") && !line.starts_with("kind:"));
    let fields: String = fields.take_while(|line| *line != "---").map(|line| format!("{line}\n")).collect();
    assert!(refusal(&fields, &["--print-config"]).contains("A: []"), "{printed}");
}
