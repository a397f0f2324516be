//! Any bytes result in a configuration or in a list of diagnostics with locations, never in a panic.

use std::path::Path;

use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use quintlet_config::Config;
use quintlet_config::diagnostics::{Diagnostic, render};
use quintlet_config::node::Origin;
use quintlet_config::print::print;
use quintlet_config::table::{Document, Service};

/// Reads a configuration, and checks the properties of any input.
fn read(bytes: &[u8], strict: bool) -> Result<Config, Vec<Diagnostic>> {
    let lines = 1 + bytes.iter().filter(|b| matches!(b, b'\n' | b'\r')).count();
    let outcome = Config::from_bytes(bytes, Path::new("f"), strict);
    let rendered = match &outcome {
        Ok(config) => &config.warnings,
        Err(diagnostics) => {
            assert!(diagnostics.iter().any(Diagnostic::is_error), "refused without an error");
            diagnostics
        }
    };
    for diagnostic in rendered {
        match &diagnostic.origin {
            Origin::File(_, line) => assert!((1..=lines).contains(line), "{line} of {lines}: {diagnostic:?}"),
            other => panic!("{other}: {diagnostic:?}"),
        }
        assert!(!diagnostic.message.is_empty());
    }
    let _ = render(rendered);
    outcome
}

/// Checks that the printed configuration parses to an equal one, and that warnings can be printed.
fn use_it(config: &Config) {
    let printed = print(config);
    let again = Config::from_bytes(printed.as_bytes(), Path::new("f"), false)
        .unwrap_or_else(|m| panic!("{}\n{printed}", render(&m)));
    for document in Document::ALL {
        for row in document.rows().iter().filter(|r| !r.secret) {
            match (config.value(document, row.field), again.value(document, row.field)) {
                (Some(one), Some(two)) => {
                    assert!(one.equals(two), "{}: {one:?} {two:?}\n{printed}", row.field)
                }
                (one, two) => assert!(one.is_none() && two.is_none(), "{}: {one:?} {two:?}", row.field),
            }
        }
    }
    for service in Service::ALL {
        let _ = (config.fixed_gates(), config.ignored(service));
    }
}

fn scalar() -> impl Strategy<Value = String> {
    prop_oneof![
        any::<i64>().prop_map(|n| n.to_string()),
        any::<f64>().prop_map(|n| format!("{n:?}")),
        any::<bool>().prop_map(|b| b.to_string()),
        Just("~".to_owned()),
        Just("\"\"".to_owned()),
        (0_u32..100_000, prop::sample::select(vec!["ms", "s", "m", "h", "%", "Mi", "m", ""]))
            .prop_map(|(n, u)| format!("{n}{u}")),
        prop::sample::select(vec![
            "none",
            "pods",
            "systemd",
            "static",
            "/a",
            "unix:///a",
            "10.0.0.1",
            "Webhook",
            "json"
        ])
        .prop_map(str::to_owned),
        "\\PC{0,12}".prop_map(|text| format!("{text:?}")),
    ]
}

fn key() -> impl Strategy<Value = String> {
    let names: Vec<String> = Document::ALL
        .into_iter()
        .flat_map(|d| d.rows().iter().flat_map(|r| r.field.split('.').map(str::to_owned).collect::<Vec<_>>()))
        .chain(["memory.available", "cpu", "key", "effect", "value", "priority"].map(str::to_owned))
        .collect();
    prop_oneof![8 => prop::sample::select(names), 1 => "[a-zA-Z.]{1,8}", 1 => scalar()]
}

/// Generates a value in flow style, which is valid at any position.
fn tree() -> impl Strategy<Value = String> {
    scalar().prop_recursive(4, 40, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(|v| format!("[{}]", v.join(", "))),
            prop::collection::vec((key(), inner), 0..5).prop_map(|v| format!(
                "{{{}}}",
                v.iter().map(|(k, v)| format!("{k}: {v}")).collect::<Vec<_>>().join(", ")
            )),
        ]
    })
}

fn document() -> impl Strategy<Value = String> {
    let head = prop::sample::select(Document::ALL.to_vec())
        .prop_map(|d| format!("apiVersion: {}\nkind: {}\n", d.api_version(), d.kind()));
    (head, prop::collection::vec((key(), tree()), 0..8))
        .prop_map(|(head, fields)| fields.iter().fold(head, |text, (k, v)| format!("{text}{k}: {v}\n")))
}

/// Generates a field of the table with a value that may be valid.
fn field() -> impl Strategy<Value = String> {
    let rows: Vec<&'static str> = Document::Kubelet.rows().iter().map(|r| r.field).collect();
    (prop::sample::select(rows), tree()).prop_map(|(field, value)| {
        let keys: Vec<&str> = field.split('.').collect();
        let (open, close) = (keys[1..].iter().map(|k| format!("{{{k}: ")).collect::<String>(), "}".repeat(keys.len() - 1));
        format!("apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n{}: {open}{value}{close}\n", keys[0])
    })
}

proptest! {
    // Failing cases are written beside this file, to be committed.
    #![proptest_config(ProptestConfig {
        cases: quintlet_testkit::budget::cases(1000),
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("proptest-regressions"))),
        ..ProptestConfig::default()
    })]

    #[test]
    fn any_bytes_result_in_a_configuration_or_errors(bytes in prop::collection::vec(any::<u8>(), 0..400), strict: bool) {
        let _ = read(&bytes, strict);
    }

    #[test]
    fn any_text_of_yaml_characters_results_in_a_configuration_or_errors(text in "[\\[\\]{}:,&*!|>%@`'\"#\\- \n\tab1~?<]{0,200}") {
        let head = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";
        let _ = read(text.as_bytes(), false);
        let _ = read(format!("{head}{text}").as_bytes(), false);
    }

    #[test]
    fn any_tree_results_in_a_configuration_or_errors(one in document(), two in document(), strict: bool) {
        if let Ok(config) = read(format!("{one}---\n{two}").as_bytes(), strict) {
            use_it(&config);
        }
    }

    #[test]
    fn any_value_of_a_field_is_accepted_or_reported(text in field()) {
        if let Ok(config) = read(text.as_bytes(), false) {
            use_it(&config);
        }
    }
}
