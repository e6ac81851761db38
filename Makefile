# Every target does its own preparation; tests/README.md has a table of what each contains.
TASK = cargo run --quiet -p xtask --

.PHONY: all deps build demo test lint dependencies compilers miri asan symbols model unit engine mutants fuzz loom integration containers cluster soak suites suites-full programs lab full bench bench-quick bench-lab image deb packaging previous ci
all: build

# Debian packages and the zig linker, only what is missing.
deps:
	@tools/install-deps.sh

test lint dependencies compilers miri asan symbols model unit engine mutants fuzz loom integration containers soak suites suites-full bench bench-quick deb: deps
	@$(TASK) $@ $(ARGS)

# Only what building, or the demo, needs.
build demo:
	@tools/install-deps.sh $@
	@$(TASK) $@ $(ARGS)

programs:
	@tools/install-deps.sh programs
	@$(TASK) $@ $(ARGS)

# `make cluster ARGS=NAME` runs the tests whose names contain NAME; ARGS=measure prints what a node pays (tests/README.md).
image cluster packaging:
	@tools/install-deps.sh image
	@$(TASK) $@ $(ARGS)

lab previous bench-lab:
	@tools/install-deps.sh lab
	@$(TASK) $@ $(ARGS)

full:
	@tools/install-deps.sh lab
	@tools/install-deps.sh programs
	@$(TASK) $@ $(ARGS)

ci:
	@.ci/run
