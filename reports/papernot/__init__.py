"""The first setting of Papernot's tutorial of 2019, run and audited."""
