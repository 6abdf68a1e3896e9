//! Tests references and the settings from the environment.

use stillhouse_base::storage::Environment;

use super::*;

#[test]
fn references_are_read() {
    let pr = "hf://org/name@refs/pr/12/m.gguf";
    let cases = [
        ("hf://gpt2", "gpt2", "main", None),
        ("hf://org/name", "org/name", "main", None),
        ("hf://org/name@v1.0", "org/name", "v1.0", None),
        ("hf://gpt2@main", "gpt2", "main", None),
        ("hf://gpt2@main/m.gguf", "gpt2", "main", Some("m.gguf")),
        ("hf://gpt2/m.GGUF", "gpt2", "main", Some("m.GGUF")),
        ("hf://org/name/q4/a@b.gguf", "org/name", "main", Some("q4/a@b.gguf")),
        ("hf://org/name@v1/q4/m.gguf", "org/name", "v1", Some("q4/m.gguf")),
        ("hf://org/name@feature%2Fx", "org/name", "feature/x", None),
        (pr, "org/name", "refs/pr/12", Some("m.gguf")),
        ("hf://org/name@refs/convert/gguf", "org/name", "refs/convert/gguf", None),
    ];
    for (text, repo, revision, file) in cases {
        let reference = reference(text);
        assert_eq!((reference.repo(), reference.revision(), reference.file()), (repo, revision, file), "{text}");
        assert_eq!(reference.to_string(), text);
        assert!(!reference.is_pinned());
    }
    assert!(reference(&format!("hf://org/name@{COMMIT}")).is_pinned());
    for local in ["model", "./hf", "https://huggingface.co/gpt2", "hf:/gpt2", ""] {
        assert_eq!(HubRef::parse(local), Ok(None));
    }
}

#[test]
fn references_that_cannot_be_are_refused() {
    for text in [
        "hf://",
        "hf:///name",
        "hf://org/",
        "hf://org/name/",
        "hf://org/name/tokenizer.json",
        "hf://org/name@",
        "hf://org/name@/m.gguf",
        "hf://org/name@../x",
        "hf://org/name@..%2F..%2Fx",
        "hf://org/name@v 1",
        "hf://org/name@a%00b",
        "hf://../name",
        "hf://org/..",
        "hf://org/name/../m.gguf",
        "hf://org/name//m.gguf",
        "hf://org/name/..\\m.gguf",
        "hf://or--g/name",
        "hf://org/na me",
        "hf://org/name?x=1",
        "hf://datasets/org/name",
        "hf://datasets/name",
    ] {
        let error = HubRef::parse(text).unwrap_err();
        assert!(error.contains(&format!("{text:?}")) && error.contains("valid: hf://org/name"), "{error}");
    }
}

fn config_of(variables: &[(&str, &str)]) -> Result<HubConfig, PipelineError> {
    Ok(HubConfig::from_environment(&variables.iter().copied().collect::<Environment>())?)
}

#[test]
fn the_cache_is_where_python_has_it() {
    let cases: [(&[(&str, &str)], &str); 6] = [
        (&[], "/home/me/.cache/huggingface/hub"),
        (&[("XDG_CACHE_HOME", "/xdg")], "/xdg/huggingface/hub"),
        (&[("HF_HOME", "/hf"), ("XDG_CACHE_HOME", "/xdg")], "/hf/hub"),
        (&[("HF_HOME", "~/hf")], "/home/me/hf/hub"),
        (&[("HUGGINGFACE_HUB_CACHE", "/old"), ("HF_HOME", "/hf")], "/old"),
        (&[("HF_HUB_CACHE", "/cache"), ("HUGGINGFACE_HUB_CACHE", "/old"), ("HF_HOME", "/hf")], "/cache"),
    ];
    for (variables, cache) in cases {
        let config = config_of(&[&[("HOME", "/home/me")], variables].concat()).unwrap();
        assert_eq!(config.cache, Path::new(cache), "{variables:?}");
        assert_eq!(config.endpoint.as_str(), "https://huggingface.co/");
        assert!(config.token.is_none() && !config.offline);
    }
    for (value, offline) in [("1", true), ("ON", true), ("true", true), ("0", false), ("", false)] {
        assert_eq!(config_of(&[("HF_HUB_OFFLINE", value)]).unwrap().offline, offline);
    }
}

#[test]
fn tokens_are_found_and_never_shown() {
    let home = TempDir::new().unwrap();
    let hf_home = home.path().to_str().unwrap();
    let elsewhere = home.path().join("other");
    fs::write(home.path().join("token"), "from_home\n").unwrap();
    fs::write(&elsewhere, "from_path").unwrap();
    let path = ("HF_TOKEN_PATH", elsewhere.to_str().unwrap());
    let bearer = |variables: &[(&str, &str)]| {
        config_of(&[&[("HF_HOME", hf_home)], variables].concat()).unwrap().token.map(|token| token.bearer())
    };
    assert_eq!(bearer(&[]).as_deref(), Some("Bearer from_home"));
    assert_eq!(bearer(&[path]).as_deref(), Some("Bearer from_path"));
    assert_eq!(bearer(&[path, ("HF_TOKEN", " from_env\r\n")]).as_deref(), Some("Bearer from_env"));
    assert_eq!(bearer(&[("HF_TOKEN", "from_env"), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")]), None);

    let config = config_of(&[("HF_TOKEN", SECRET)]).unwrap();
    assert!(!format!("{config:?} {:?}", Hub::new(config.clone())).contains("secret"));
    let error = config_of(&[("HF_TOKEN", "secret\nsecret")]).unwrap_err();
    assert!(error.kind == ErrorKind::Usage && !format!("{error:?}").contains("secret"), "{error:?}");
}

#[test]
fn endpoints_are_addresses_without_secrets() {
    for endpoint in ["huggingface.co", "ftp://x", "https://", "https://me:secret@x", "https://x?token=secret"] {
        let error = config_of(&[("HF_ENDPOINT", endpoint)]).unwrap_err();
        let text = format!("{error} {error:?}");
        assert!(text.contains("HF_ENDPOINT") && !text.contains("secret"), "{text}");
    }
    // A mirror with a path.
    let fixture = Fixture::gpt2();
    let config =
        HubConfig { endpoint: format!("{}/hf/", fixture.fake_hub.hub_url).parse().unwrap(), ..fixture.config() };
    let _ = fixture.fetch_with(config, "hf://org/name", FetchPurpose::Tokenizer);
    assert_eq!(fixture.fake_hub.take_requests()[0].path, "/hf/api/models/org/name/revision/main");
}

#[test]
fn certificates_that_cannot_be_read_are_said() {
    let fixture = Fixture::gpt2();
    let config = HubConfig { ca_bundle: Some(fixture.cache.path().join("no.pem")), ..fixture.config() };
    let error = fixture.fetch_with(config, "hf://org/name", FetchPurpose::Tokenizer).unwrap_err();
    assert!(error.kind == ErrorKind::Usage && error.to_string().contains("no.pem"), "{error}");
}
