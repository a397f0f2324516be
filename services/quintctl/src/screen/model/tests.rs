use quintlet_proto::podsync::v1::SourceProblem;
use ratatui::Terminal;
use ratatui::backend::TestBackend;

use super::*;

fn view(names: &[&str]) -> View {
    let pod = |name: &&str| PodView {
        uid: format!("uid-{name}"),
        name: (*name).to_owned(),
        namespace: "default".to_owned(),
        ready: "1/1".to_owned(),
        status: "Running".to_owned(),
        created_unix_ns: 1,
        ..PodView::default()
    };
    let problem = SourceProblem {
        source: "file".into(),
        origin: "/m/broken.yaml".into(),
        message: "required".into(),
        ..SourceProblem::default()
    };
    View {
        pods: names.iter().map(|n| (format!("uid-{n}"), pod(n))).collect(),
        problems: vec![problem],
        complete: true,
    }
}

fn content(text: &str) -> Content {
    Content { title: String::new(), text: text.to_owned() }
}

fn press(model: &mut Model, code: KeyCode) -> KeyEffect {
    model.key(KeyEvent::new(code, KeyModifiers::NONE))
}

fn drawn(model: &mut Model, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|f| model.draw(f)).unwrap();
    let buffer = terminal.backend().buffer().clone();
    let lines = buffer.content().chunks(usize::from(width));
    lines
        .map(|l| l.iter().map(ratatui::buffer::Cell::symbol).collect::<String>().trim_end().to_owned() + "\n")
        .collect()
}

#[test]
fn the_table_is_between_the_header_and_the_keys() {
    let mut model = Model { header: vec!["quintlet 0.1.0".into()], ..Model::default() };
    model.show(&view(&["web", "once"]), 12_000_000_000);
    assert_eq!(
        drawn(&mut model, 66, 14),
        "\
quintlet 0.1.0

NAME         READY  STATUS           RESTARTS  AGE  WAITING FOR
once         1/1    Running          0         11s
web          1/1    Running          0         11s
broken.yaml  –      InvalidManifest  –         12s  required







q quit   ↑↓ select   l logs   e explain   t trace
"
    );
}

#[test]
fn a_narrow_terminal_shows_the_wait_of_a_pod_instead_of_address_age_and_restarts() {
    let mut model = Model::new(vec!["pod-sync"]);
    let mut view = view(&["web"]);
    let reason = "Back-off pulling image";
    view.problems[0].message = reason.into();
    model.show(&view, 12_000_000_000);
    let seen = drawn(&mut model, 70, 14);
    assert!(seen.contains("NAME         READY  STATUS           RESTARTS  WAITING FOR\n"), "{seen}");
    assert!(seen.contains(reason), "{seen}");
    let seen = drawn(&mut model, 60, 14);
    assert!(
        seen.contains("NAME         READY  STATUS           WAITING FOR\n") && seen.contains(reason),
        "{seen}"
    );
    assert!(seen.ends_with("q quit  ↑↓  l logs  e explain  t trace  k kill\n"), "{seen}");
    assert!(drawn(&mut model, 120, 14).contains("RESTARTS  IP  AGE  WAITING FOR"));
}

#[test]
fn a_terminal_of_any_size_is_drawn() {
    let header = || vec!["one".to_owned(), "two".to_owned()];
    let mut model = Model::new(vec!["pod-sync"]);
    model.show(&view(&["a", "b", "c"]), 0);
    for panel in [false, true] {
        if panel {
            press(&mut model, KeyCode::Char('e'));
        }
        for (width, height) in [(1, 1), (2, 3), (200, 2), (5, 60)] {
            model.header = header();
            drawn(&mut model, width, height);
        }
    }
    // With few lines, rows are omitted before the header, which keeps the health of the services.
    press(&mut model, KeyCode::Esc);
    model.header = header();
    let seen = drawn(&mut model, 60, 6);
    assert!(seen.starts_with("two\nNAME") && seen.contains("\nc "), "{seen}");
}

#[test]
fn the_selection_stays_on_its_pod_and_is_visible() {
    let mut model = Model::default();
    model.show(&view(&["b", "c"]), 0);
    press(&mut model, KeyCode::Down);
    assert_eq!(model.rows[model.selected].name, "c");
    model.show(&view(&["a", "b", "c", "d"]), 0);
    assert_eq!(model.rows[model.selected].name, "c");
    model.show(&view(&[]), 0);
    assert_eq!(model.selected, 0);
    model.show(&view(&["a", "b", "c", "d", "e"]), 0);
    press(&mut model, KeyCode::End);
    let seen = drawn(&mut model, 60, 4);
    assert!(seen.contains("broken.yaml") && !seen.contains("\na "), "{seen}");
}

#[test]
fn the_first_row_is_selected_until_another_is_chosen() {
    let mut model = Model::default();
    // The broken manifest is known before the first pod.
    model.show(&view(&[]), 0);
    model.show(&view(&["web"]), 0);
    assert_eq!(model.rows[model.selected].name, "web");
    model.show(&view(&["crasher", "web"]), 0);
    assert_eq!(model.rows[model.selected].name, "crasher");
}

#[test]
fn panels_close_and_accept_only_their_own_content() {
    let mut model = Model::default();
    model.show(&view(&["web"]), 0);
    assert_eq!(press(&mut model, KeyCode::Char('l')), KeyEffect::Open);
    let source = model.wanted().unwrap();
    assert_eq!(press(&mut model, KeyCode::Char('c')), KeyEffect::Open, "the next container");
    assert!(!model.fill(&source, &content("of the first")));
    assert_eq!(press(&mut model, KeyCode::Char('t')), KeyEffect::Open);
    assert!(!model.fill(&source, &content("of the log")));
    assert!(drawn(&mut model, 40, 14).contains("trace web\n…\n"));
    assert_eq!(press(&mut model, KeyCode::Char('q')), KeyEffect::Stay);
    assert!(model.panel.is_none());
    assert_eq!(press(&mut model, KeyCode::Char('q')), KeyEffect::Quit);
    assert_eq!(model.key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)), KeyEffect::Quit);
}

#[test]
fn an_invalid_manifest_shows_its_file_and_error_for_every_key() {
    let mut model = Model::default();
    model.show(&view(&["web"]), 12_000_000_000);
    press(&mut model, KeyCode::End);
    for key in ['e', 'l', 't'] {
        assert_eq!(press(&mut model, KeyCode::Char(key)), KeyEffect::Stay);
        let seen = drawn(&mut model, 100, 14);
        assert!(
            seen.contains("explain broken.yaml\nmanifest /m/broken.yaml\n  problem    required\n"),
            "{seen}"
        );
        press(&mut model, KeyCode::Esc);
    }
}

#[test]
fn a_log_shows_its_end_until_scrolled() {
    let mut model = Model::default();
    model.show(&view(&["web"]), 0);
    press(&mut model, KeyCode::Char('l'));
    let source = model.wanted().unwrap();
    let text: String = (1..=9).map(|n| format!("line {n}\n")).collect();
    assert!(model.fill(&source, &content(&text)));
    let seen = drawn(&mut model, 40, 5);
    assert!(seen.starts_with("logs web\nline 7\nline 8\nline 9\n"), "{seen}");
    press(&mut model, KeyCode::Up);
    assert!(drawn(&mut model, 40, 5).contains("line 6\nline 7\nline 8\n"));
    press(&mut model, KeyCode::End);
    assert!(drawn(&mut model, 40, 5).contains("line 9"));
}

#[test]
fn long_lines_of_a_panel_can_be_read_at_every_width() {
    let mut model = Model::default();
    model.show(&view(&["web"]), 0);
    press(&mut model, KeyCode::Char('e'));
    let source = model.wanted().unwrap();
    drawn(&mut model, 60, 14);
    model.fill(&source, &content("  event      a message that does not fit into this terminal\n"));
    let seen = drawn(&mut model, 30, 14);
    assert!(seen.contains("  event      a message that do\n             es not fit into t\n"), "{seen}");
    assert!(
        drawn(&mut model, 80, 14).contains("  event      a message that does not fit into this terminal\n")
    );
}

#[test]
fn a_service_is_killed_only_by_its_number() {
    let mut model = Model::new(vec!["cri-proxy", "pod-sync"]);
    model.show(&view(&["web"]), 0);
    assert_eq!(press(&mut model, KeyCode::Char('2')), KeyEffect::Stay, "a digit alone does nothing");
    press(&mut model, KeyCode::Char('k'));
    let seen = drawn(&mut model, 80, 14);
    assert!(seen.ends_with("kill -9 which service?  1 cri-proxy  2 pod-sync   esc cancel\n"), "{seen}");
    assert_eq!(press(&mut model, KeyCode::Char('2')), KeyEffect::Kill(1));
    for other in [KeyCode::Esc, KeyCode::Char('3'), KeyCode::Char('0'), KeyCode::Char('q')] {
        press(&mut model, KeyCode::Char('k'));
        assert_eq!(press(&mut model, other), KeyEffect::Stay, "{other:?}");
        assert!(!drawn(&mut model, 80, 14).contains("which service?"), "{other:?}");
    }
    model.notice = Some("pod-sync serves again after 0.4s".into());
    assert!(drawn(&mut model, 80, 14).ends_with("pod-sync serves again after 0.4s\n"));
    press(&mut model, KeyCode::Down);
    assert!(drawn(&mut model, 80, 14).contains("q quit"));
    let mut unsupervised = Model::default();
    unsupervised.show(&view(&["web"]), 0);
    press(&mut unsupervised, KeyCode::Char('k'));
    assert!(!drawn(&mut unsupervised, 80, 14).contains("kill"));
}
